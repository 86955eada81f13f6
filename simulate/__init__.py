"""From a description of electron-scattering experiments to shards of simulated samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exitwave.simulate.campaign import CampaignResult, run_campaign
    from exitwave.simulate.cluster import make_cluster
    from exitwave.simulate.cost import calibrate
    from exitwave.simulate.plan import Plan, make_plan
    from exitwave.simulate.simulator import Sample, get_simulator, simulate_sample
    from exitwave.simulate.spec import CampaignSpec
    from exitwave.simulate.state import campaign_failures, campaign_status
    from exitwave.simulate.tasks import SampleSpec, TaskSpec

__all__ = [
    "CampaignResult",
    "CampaignSpec",
    "Plan",
    "Sample",
    "SampleSpec",
    "TaskSpec",
    "calibrate",
    "campaign_failures",
    "campaign_status",
    "get_simulator",
    "make_cluster",
    "make_plan",
    "run_campaign",
    "simulate_sample",
]

_WHERE = {
    "CampaignResult": "campaign",
    "CampaignSpec": "spec",
    "Plan": "plan",
    "Sample": "simulator",
    "SampleSpec": "tasks",
    "TaskSpec": "tasks",
    "calibrate": "cost",
    "campaign_failures": "state",
    "campaign_status": "state",
    "get_simulator": "simulator",
    "make_cluster": "cluster",
    "make_plan": "plan",
    "run_campaign": "campaign",
    "simulate_sample": "simulator",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used: a worker that only simulates pays for nothing else."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
