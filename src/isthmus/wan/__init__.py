"""Wide-area links: dialling through them and emulating them on one machine, with or without root."""

from isthmus.wan.background_emulator import BackgroundLinks, links_in_background
from isthmus.wan.dial import dial, format_address
from isthmus.wan.emulator import run_links
from isthmus.wan.netns import Namespaces, emulated_namespaces
from isthmus.wan.tcp_listener import PortRange, listen, local_address

__all__ = [
    "BackgroundLinks",
    "Namespaces",
    "PortRange",
    "dial",
    "emulated_namespaces",
    "format_address",
    "links_in_background",
    "listen",
    "local_address",
    "run_links",
]
