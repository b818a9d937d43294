"""The process of a tenant gateway: devices and sockets, rules in the kernel, and timers around `TenantGateway`."""
