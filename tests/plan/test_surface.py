"""The public surface of `isthmus.plan`: a few functions, pinned."""

import isthmus.plan


def test_the_surface_is_pinned():
    """What a notebook may rely on changes only on purpose; every name is there and documented."""
    assert {
        "DATA_SHEET",
        "Calibration",
        "Forecast",
        "ModelProfile",
        "Observation",
        "estimate_s",
        "fit_calibration",
        "fit_shapes",
        "load_calibration",
        "make_plans",
        "predict",
        "profile_model",
        "save_calibration",
        "stage_memory",
    } <= set(isthmus.plan.__all__)
    assert all(getattr(isthmus.plan, name).__doc__ for name in isthmus.plan.__all__)
