"""`stranger_filter`: the nftables script that drops, and counts, what is not from a gateway before it is read."""

from __future__ import annotations

from isthmus.wan.tenancy.tenants_file import TenantsFile

TABLE = "isthmus_tenants"
COUNTER = "strangers"


def stranger_filter(file: TenantsFile) -> str:
    """Return the script for `nft -f -`; it takes the place of an earlier one, whose count it ends."""
    to = f"ip daddr {file.gateways[file.site]}"
    others = ", ".join(str(address) for site, address in file.gateways.items() if site != file.site)
    return "\n".join(
        [
            f"table inet {TABLE}",
            f"delete table inet {TABLE}",
            f"table inet {TABLE} {{",
            f"  counter {COUNTER} {{ }}",
            "  chain incoming { type filter hook input priority -150; policy accept;",
            *(
                f"    {to} {protocol} dport {file.port} ip saddr != {{ {others} }} counter name {COUNTER} drop"
                for protocol in ("udp", "tcp")
            ),
            "  }",
            "}",
            "",
        ]
    )
