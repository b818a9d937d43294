"""RoCEv2 in user space: packets to the byte, and the gateway that carries them across a long link."""

from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.roce_packet import RocePacket
from isthmus.wan.roce.roce_packet import build_roce as build
from isthmus.wan.roce.roce_packet import icrc_of as icrc
from isthmus.wan.roce.roce_packet import parse_roce as parse

__all__ = ["Gateway", "GatewaySettings", "RocePacket", "build", "icrc", "parse"]
