"""Wide-area links: dialling through them, proxies across them, and emulating them, with or without root."""

from isthmus.wan.background_emulator import BackgroundLinks, links_in_background
from isthmus.wan.centre.centre_client import CentreClient
from isthmus.wan.centre.centre_config import CentreConfig, read_centre_token
from isthmus.wan.centre.centre_requests import PathState
from isthmus.wan.centre.line_client import CentreAddress
from isthmus.wan.centre.logged_centre import LoggedCentre
from isthmus.wan.centre.logged_domain import LoggedDomain
from isthmus.wan.centre.run_centre import run_centre
from isthmus.wan.centre.run_domain import run_domain
from isthmus.wan.control.wan_topology import Admission, AdmissionFile, Booking, FlowMatch, PathRequest, TransferBooking
from isthmus.wan.controller.admit_all import admit_all
from isthmus.wan.crossing.choose_crossing import CrossingChoice, choose_crossing
from isthmus.wan.crossing.crossing_processes import CrossingProcesses, process_ids, site_crossings
from isthmus.wan.crossing.plan_file_tunnels import plan_file_tunnels
from isthmus.wan.crossing.plan_tunnels import TunnelPlan
from isthmus.wan.dial import dial, format_address, parse_address
from isthmus.wan.edge.apply_edge_settings import apply_edge_settings
from isthmus.wan.edge.edge_settings import EdgeSettings, edge_settings
from isthmus.wan.edge.edge_state import read_edge_state, write_edge_state
from isthmus.wan.edge.follow_edge import follow_edge
from isthmus.wan.emulator import run_links
from isthmus.wan.gateway.gateway_config import FarSite, GatewayConfig
from isthmus.wan.gateway.run_gateway import run_gateway
from isthmus.wan.link_probe import answer_probe, listen_for_probes, probe_link
from isthmus.wan.management_network import management_network
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason
from isthmus.wan.proxy.proxy_config import LOOPBACK, LegTransport, ProxyConfig, parse_network, read_proxy_key
from isthmus.wan.proxy.run_proxy import run_proxy
from isthmus.wan.read_route import read_route
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import (
    MessageArrived,
    NicArrival,
    NicEvent,
    NicFailed,
    NicSettings,
    NicTick,
    PostWork,
    RoceNic,
    Transmit,
    WorkDone,
)
from isthmus.wan.roce.roce_opcodes import PSN_SPAN, UDP_PORT
from isthmus.wan.roce.roce_packet import RethHeader, frame_of_payload
from isthmus.wan.tcp_listener import PortRange, listen, local_address
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.choose_datapath import CarriedIn
from isthmus.wan.tenants.probe_tenancy import probe_tenancy
from isthmus.wan.tenants.read_tenants import read_tenants
from isthmus.wan.tenants.run_tenants import run_tenants
from isthmus.wan.udp_socket import UdpSocket

__all__ = [
    "LOOPBACK",
    "PSN_SPAN",
    "UDP_PORT",
    "Admission",
    "AdmissionFile",
    "BackgroundLinks",
    "Booking",
    "CarriedIn",
    "CentreAddress",
    "CentreClient",
    "CentreConfig",
    "CrossingChoice",
    "CrossingProcesses",
    "EdgeSettings",
    "FarSite",
    "FlowMatch",
    "GatewayConfig",
    "GatewaySettings",
    "LegTransport",
    "LoggedCentre",
    "LoggedDomain",
    "MessageArrived",
    "Namespaces",
    "NicArrival",
    "NicEvent",
    "NicFailed",
    "NicSettings",
    "NicTick",
    "PathRequest",
    "PathState",
    "PortRange",
    "PostWork",
    "ProxyConfig",
    "RethHeader",
    "RoceNic",
    "TenantsFile",
    "TransferBooking",
    "Transmit",
    "TunnelPlan",
    "UdpSocket",
    "WorkDone",
    "admit_all",
    "answer_probe",
    "apply_edge_settings",
    "choose_crossing",
    "dial",
    "edge_settings",
    "effective_capabilities",
    "emulated_namespaces",
    "follow_edge",
    "format_address",
    "frame_of_payload",
    "links_in_background",
    "listen",
    "listen_for_probes",
    "local_address",
    "management_network",
    "parse_address",
    "parse_network",
    "plan_file_tunnels",
    "probe_link",
    "probe_tenancy",
    "process_ids",
    "read_centre_token",
    "read_edge_state",
    "read_proxy_key",
    "read_route",
    "read_tenants",
    "run_centre",
    "run_domain",
    "run_gateway",
    "run_links",
    "run_proxy",
    "run_tenants",
    "site_crossings",
    "unavailable_reason",
    "write_edge_state",
]
