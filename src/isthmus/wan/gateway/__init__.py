"""The process of a RoCEv2 gateway: frames of NICs, sealed datagrams to other sites, and timers around `Gateway`."""
