"""Wide-area links: dialling through them and emulating them on one machine, with or without root."""

from isthmus.wan.background_emulator import BackgroundLinks, links_in_background
from isthmus.wan.dial import dial, format_address
from isthmus.wan.emulator import run_links
from isthmus.wan.netns import Namespaces, emulated_namespaces

__all__ = [
    "BackgroundLinks",
    "Namespaces",
    "dial",
    "emulated_namespaces",
    "format_address",
    "links_in_background",
    "run_links",
]
