"""Heat in a square plate: warm spots spread, a camera with noise looks at them later. Which spots were there?

The inverse problem of the heat equation in two dimensions, simulated with NumPy alone. A campaign (heat.yaml) draws the
parameters; `train.py` learns the way back.
"""

import numpy as np

from exitwave.simulate import FieldSpec, own_simulator

N = 32  # pixels along each edge of the plate, which is periodic
AXES = ("y", "x")


@own_simulator(
    version="1",
    fields=[
        FieldSpec(name="later", dtype="<f4", shape=(N, N), axes=AXES, unit="K", meaning="what the camera sees"),
        FieldSpec(name="initial", dtype="<f4", shape=(N, N), axes=AXES, unit="K", meaning="temperature at the start"),
    ],
)
def simulate(parameters):
    """One plate: `spots` of `width_mm`, diffusivity, time, and the noise of the camera."""
    rng = np.random.default_rng(parameters["seed"])
    edge_mm = 32.0
    k_per_mm = 2.0 * np.pi * np.fft.fftfreq(N, d=edge_mm / N)
    k_squared = k_per_mm[:, None] ** 2 + k_per_mm[None, :] ** 2

    # Points of 5 to 20 K mm², each made a Gaussian of the given width: a product in Fourier space.
    points = np.zeros((N, N))
    for _ in range(int(parameters["spots"])):
        points[tuple(rng.integers(N, size=2))] += rng.uniform(5.0, 20.0) / (edge_mm / N) ** 2
    start = np.fft.fft2(points) * np.exp(-k_squared * parameters["width_mm"] ** 2 / 2.0)

    # dT/dt = D laplace(T): each Fourier component decays by exp(-D k² t).
    decay = np.exp(-parameters["diffusivity_mm2_per_s"] * k_squared * parameters["time_s"])
    later = np.fft.ifft2(start * decay).real + parameters["noise_K"] * rng.standard_normal((N, N))
    return {"later": later.astype(np.float32), "initial": np.fft.ifft2(start).real.astype(np.float32)}
