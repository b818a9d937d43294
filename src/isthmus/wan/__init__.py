"""Wide-area links: dialling through them, proxies across them, and emulating them, with or without root."""

from isthmus.wan.background_emulator import BackgroundLinks, links_in_background
from isthmus.wan.control.admit_all import admit_all
from isthmus.wan.control.wan_topology import Admission, AdmissionFile
from isthmus.wan.dial import dial, format_address, parse_address
from isthmus.wan.emulator import run_links
from isthmus.wan.gateway.gateway_config import FarSite, GatewayConfig
from isthmus.wan.gateway.run_gateway import run_gateway
from isthmus.wan.netns import Namespaces, emulated_namespaces
from isthmus.wan.proxy.proxy_config import LegTransport, ProxyConfig, parse_network, read_proxy_key
from isthmus.wan.proxy.run_proxy import run_proxy
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.tcp_listener import PortRange, listen, local_address
from isthmus.wan.udp_socket import UdpSocket

__all__ = [
    "Admission",
    "AdmissionFile",
    "BackgroundLinks",
    "FarSite",
    "GatewayConfig",
    "GatewaySettings",
    "LegTransport",
    "Namespaces",
    "PortRange",
    "ProxyConfig",
    "UdpSocket",
    "admit_all",
    "dial",
    "emulated_namespaces",
    "format_address",
    "links_in_background",
    "listen",
    "local_address",
    "parse_address",
    "parse_network",
    "read_proxy_key",
    "run_gateway",
    "run_links",
    "run_proxy",
]
