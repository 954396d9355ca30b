"""The end of a step: every process that could have cached a shard lets go of it."""

from rollout_svc.tensors.clearing.controller import Controller, Step
from rollout_svc.tensors.clearing.plan import Failure
from rollout_svc.tensors.clearing.ports import Connect, Peer
from rollout_svc.tensors.clearing.ray import RayPeer
from rollout_svc.tensors.clearing.records import Cleared, Statistics
from rollout_svc.tensors.clearing.roles import Consumer
from rollout_svc.tensors.clearing.sync import SyncController
from rollout_svc.tensors.clearing.watch import Figures, Leak

__all__ = [
    "Cleared",
    "Connect",
    "Consumer",
    "Controller",
    "Failure",
    "Figures",
    "Leak",
    "Peer",
    "RayPeer",
    "Statistics",
    "Step",
    "SyncController",
]
