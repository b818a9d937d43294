"""`RNR_TIMERS_S`: how long a requester waits after a NAK `receiver not ready`, by the five bits of its timer.

Source: InfiniBand Architecture Specification, volume 1, table 45.
"""

RNR_TIMERS_S = tuple(
    1e-3 * ms
    for ms in (
        655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92,
        2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52,
    )
)  # fmt: skip
