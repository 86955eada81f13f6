"""Configuration: positions, refusals, overrides, and messages that a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitwave.ingest.errors import UsageError
from exitwave.simulate.spec import CampaignSpec
from exitwave.workflows.config import (
    apply_overrides,
    load_document,
    parse_bytes,
    parse_document,
    rank_environment,
    validate,
)
from exitwave.workflows.pipeline_spec import read_sections
from exitwave.workflows.resolved import differences, dump_yaml

CAMPAIGN = """\
name: x
structures:
  - library: [Au]
  - prototype: rocksalt
    elements: [Mg, O]
    a_A: 4.2
sampling:
  energy_keV: 200
"""


def parse(text: str, *overrides: str) -> Any:
    document = parse_document(text, source="c.yaml", folder=Path())
    apply_overrides(document, overrides)
    return document


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        validate(parse(text, *overrides), CampaignSpec)
    return str(caught.value)


def test_a_good_file_is_read() -> None:
    spec = validate(parse(CAMPAIGN), CampaignSpec)
    assert spec.structures[1].elements == ("Mg", "O")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "c.yaml:2:1: a: this key stands twice (first at c.yaml:1:1)"),
        ("x:\n  y: 1\n  y: 2\n", "c.yaml:3:3: x.y: this key stands twice"),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "c.yaml:1:4: the tag !!python/object/apply:os.system is not read",
        ),
        ("a: !mine 3\n", "c.yaml:1:4: the tag !mine is not read"),
        ("base: &b {x: 1}\nother:\n  <<: *b\n", "c.yaml:3:3: merge keys"),
        ("a: [1,\n b: 3\n", "not valid YAML"),
        ("a:\n\t- 3\n", "Indent with spaces"),
        ("- 1\n- 2\n", "c.yaml:1:1: expected `key: value` lines, got a list"),
        ("", "c.yaml:1:1: the file is empty"),
        ("a: &x [*x]\n", "refers to what it stands in"),
        ("a: " + "[" * 60 + "]" * 60, "c.yaml:1:54: nested too deeply; at most 50 levels"),
        ("a: " + "[" * 3000 + "]" * 3000, "c.yaml: nested too deeply to be read; at most 50 levels"),
        ("a: " + "{b: " * 900 + "1" + "}" * 900, "nested too deeply"),
        ("a: 1\nb: 0x" + "f" * 5000, "c.yaml:2:4: 0xfff"),
        ("a: " + "9" * 5000, "is not what its tag !!int says"),
    ],
)
def test_bad_yaml_is_refused_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert expected in str(caught.value)


def test_an_explosion_of_aliases_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(UsageError, match="once aliases are followed"):
        parse("\n".join(lines))


def test_every_fault_is_listed_with_its_place() -> None:
    text = CAMPAIGN.replace("energy_keV: 200", "energy_keV: 200000\n  defocuss_A: 3") + "samples_per_shard: 0\nsed: 4\n"
    lines = refusal(text).splitlines()
    assert any(line.startswith("c.yaml:8:3: sampling.energy_keV: 200000: expected 1..1000 keV") for line in lines)
    assert "given in eV?" in "".join(lines)
    assert "c.yaml:9:3: sampling.defocuss_A: unknown key; did you mean `defocus_A`?" in lines
    assert "c.yaml:10:1: samples_per_shard: expected a value >= 1, got 0" in lines
    assert "c.yaml:11:1: sed: unknown key; did you mean `seed`?" in lines
    assert len(lines) == 4


def test_a_key_without_its_unit_is_told_the_unit() -> None:
    assert "did you mean `a_A`" in refusal(CAMPAIGN.replace("a_A: 4.2", "a: 4.2"))
    assert "did you mean `energy_keV`" in refusal(CAMPAIGN.replace("energy_keV", "energy"))


def test_a_fault_inside_a_list_has_its_own_place() -> None:
    text = refusal(CAMPAIGN.replace("elements: [Mg, O]", "element: [Mg, O]"))
    assert "c.yaml:5:5: structures[1].element: unknown key; did you mean `elements`?" in text


def test_a_missing_key_is_named() -> None:
    assert "name: this key is missing" in refusal(CAMPAIGN.replace("name: x\n", ""))


def test_a_wrong_distribution_names_its_key() -> None:
    text = refusal(CAMPAIGN.replace("energy_keV: 200", "energy_keV: {uniform: [300, 100]}"))
    assert text.startswith("c.yaml:8:3: sampling.energy_keV")
    assert "low <= high" in text
    assert "pydantic" not in text


def test_overrides_change_values_and_are_named_in_messages() -> None:
    spec = validate(parse(CAMPAIGN, "scan.shape=[4, 4]", "label.shape=[8, 8]", "structures.0.split=test"), CampaignSpec)
    assert (spec.scan.shape, spec.structures[0].split) == ((4, 4), "test")
    assert refusal(CAMPAIGN, "scan.step_A=-1").startswith(
        "--set scan.step_A=-1: scan.step_A: expected a value >= 0.001"
    )


@pytest.mark.parametrize(
    "option",
    [
        "nothing",
        "=3",
        "structures.9.split=test",
        "structures[²].split=test",
        f"structures[{'9' * 5000}].split=test",
        "name.first=a",
        "a=[1",
        "a=!!int x",
        f"a={'[' * 2000}{']' * 2000}",
    ],
)
def test_bad_overrides_name_the_option(option: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(parse(CAMPAIGN, option), CampaignSpec)
    assert str(caught.value).startswith(f"--set {option}")


PIPELINE = """\
campaign:
  name: x
  structures: [{library: [Au]}]
train:
  steps: 3
ranks: 2
"""


def sections(text: str, *overrides: str, section: Any = "campaign") -> Any:
    return read_sections(parse_document(text, source="p.yaml", folder=Path()), overrides, section)


def test_a_pipeline_lends_its_section_to_a_verb() -> None:
    assert sections(PIPELINE, "seed=7", section="train").train.seed == 7
    read = sections(PIPELINE, "seed=7", "train.seed=8", "ranks=3")
    assert (read.campaign.seed, read.train.seed, read.ranks) == (7, 8, 3)
    assert sections("train: {steps: 3}\n", section="train").train.steps == 3
    with pytest.raises(UsageError, match=r"no `campaign:` section \(it has: name, train\)"):
        sections("name: p\ntrain: {steps: 3}\n")
    with pytest.raises(UsageError, match=r"no `train:` section \(it has: campaign, train\)"):
        sections("campaign: {name: x, structures: [{library: [Au]}]}\ntrain:\n", section="train")


@pytest.mark.parametrize("section", ["campaign", "train"])
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("ranks: 2", "rank: 2", "p.yaml:6:1: rank: unknown key; did you mean `ranks`?"),
        ("ranks: 2", "ranks: true", "p.yaml:6:1: ranks: expected a whole number, got True"),
        ("ranks: 2", "name: [a, [b]]", "p.yaml:6:1: name: expected text, got ['a', ['b']]"),
        ("ranks: 2", "cluster: {kind: slrum}", "p.yaml:6:11: cluster.kind: expected inline, local, slurm, cuda"),
        ("ranks: 2", "cluster: {kind: 'tcp://'}", "p.yaml:6:11: cluster.kind: expected inline, local, slurm, cuda"),
        ("ranks: 2", "stage: {capacity: big}", "p.yaml:6:9: stage.capacity: expected a size"),
        ("ranks: 2", "evaluate: {split: tset}", "p.yaml:6:12: evaluate.split: expected 'train', 'val', 'test',"),
        ("  steps: 3", "  stepz: 3", "p.yaml:5:3: train.stepz: unknown key; did you mean `steps`?"),
        ("  name: x", "  nam: x", "p.yaml:2:3: campaign.nam: unknown key; did you mean `name`?"),
        ("\n  steps: 3", " 3", "p.yaml:4:1: train: expected `key: value` entries, got 3"),
    ],
)
def test_every_section_is_checked_whichever_is_used(section: str, before: str, after: str, told: str) -> None:
    assert before in PIPELINE
    with pytest.raises(UsageError) as caught:
        sections(PIPELINE.replace(before, after), section=section)
    assert told in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_document(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="a folder"):
        load_document(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        load_document(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "value"), [("20GB", 20 * 10**9), ("512MiB", 512 * 2**20), ("1.5k", 1500), ("7", 7), ("2e3", 2000)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "20XB", "-3GB", "0", "1 2", "nan"])
def test_bad_sizes_name_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--capacity: expected a size"):
        parse_bytes(text)


def test_rank_environments() -> None:
    assert rank_environment({}) is None
    rank = rank_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert rank is not None and (rank.rank, rank.world_size, rank.launcher) == (1, 4, "torchrun")
    assert rank.init_method(Path("run")) == "env://"
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"}
    rank = rank_environment(slurm)
    assert rank is not None and (rank.rank, rank.world_size, rank.launcher) == (2, 3, "srun")
    assert rank.init_method(Path("/run")) == "file:///run/.rendezvous-9-0-0"
    again = rank_environment(slurm | {"SLURM_RESTART_COUNT": "1"})  # a requeued job: not at what the killed ranks left
    assert again is not None and again.init_method(Path("/run")) == "file:///run/.rendezvous-9-0-1"
    assert rank_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}) is None  # inside an allocation, but no step
    with pytest.raises(UsageError, match="expected numbers"):
        rank_environment({"RANK": "one", "WORLD_SIZE": "2"})


def test_differences_are_readable() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": 0.1}, "gone": 3}
    after = {"a": 1, "b": {"c": [1, 3], "d": 0.2}, "new": None}
    assert differences(before, after) == [
        "b.c[1]: was 2, now 3",
        "b.d: was 0.1, now 0.2",
        "gone: was 3, now not given",
        "new: was not given, now None",
    ]
    assert differences(after, after) == []


scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=12)
values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(texts.filter(lambda t: t != "<<"), values, min_size=1, max_size=4))
def test_what_is_dumped_is_read_back(data: dict[str, Any]) -> None:
    try:
        again = parse_document(dump_yaml(data, comment=["made by a test"]), source="t", folder=Path()).data
    except UsageError as error:
        assert "merge keys" in str(error)
        return
    assert differences(data, again) == []
