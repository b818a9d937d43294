"""The RoCEv2 gateway as a pure state machine: flows to and from the far gateway, pacing, failures, datagrams."""
