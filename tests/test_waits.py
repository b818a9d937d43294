"""Every wait of the source has a limit, or an entry here that says what ends it (docs/design/waits.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "isthmus"
PAGE = ROOT / "docs" / "design" / "waits.md"

BLOCKING = frozenset({"wait", "join", "get", "result", "acquire", "communicate"})
"""Methods that block without a limit if they are called without an argument."""

PAUSES = frozenset({"sleep", "wait", "select", "sigtimedwait", "wait_for"})
LIMIT_WORDS = ("deadline", "limit", "left_s", "remaining", "timeout", "end_s")
"""A loop that pauses has a limit if it reads a name with one of these words."""

PEER = "the peer: its loss fails every message after `peer_timeout_s`; the agent ends a silent worker"
KILLED = "the kernel: the process has been killed or its pipe closed before"
CLOSED = "this object: what the thread waits for has been closed before"
DONE = "nothing: the result is there already"
OWN = "itself: the method that it calls has the limit"
COPY = "the copy: a bounded amount of memory or disk; the agent ends a silent worker"
SERVICE = "its owner: the loop of a service runs until it is stopped, with a pause of fixed length"
USER = "the job's end or the user's Ctrl-C"
KIT = "the test that runs the conformance kit"

PROGRAM = "the end of the program that it runs, which the agent stops"

ALLOWED = {
    "agent/adapters/ray/holder.py main": SERVICE,
    "agent/adapters/rules/hold_rules.py cancelled_while_it_is_asked_for": KIT,
    "agent/adapters/rules/hold_rules.py cancelled_while_starting": KIT,
    "agent/adapters/rules/hold_rules.py holds_at_the_same_time_are_one": KIT,
    "agent/adapters/rules/program_rules.py starts_at_the_same_time_are_one": KIT,
    "agent/adapters/rules/program_rules.py stop_races_with_start": KIT,
    "core/process/container_start.py main": PROGRAM,
    "agent/courier/courier_listener.py CourierListener._accept": SERVICE,
    "agent/courier/courier_listener.py CourierListener._watch": SERVICE,
    "agent/service/agent_loop.py _leave_pool": SERVICE,
    "agent/service/agent_loop.py _own_address": SERVICE,
    "agent/service/agent_loop.py run_agent": SERVICE,
    "agent/network/peer_prober.py PeerProber.checks": DONE,
    "agent/service/scheduler_calls.py SchedulerCalls.collect": DONE,
    "cli/commands/follow_commands.py job_snapshots": USER,
    "cli/commands/follow_commands.py logs": USER,
    "cli/commands/measure_links.py _sink_server": CLOSED,
    "cli/commands/site/duty_commands.py _wait_until_empty": USER,
    "cli/demo/demo_pool.py _wait_or_kill": KILLED,
    "client/client.py Client.watch": USER,
    "comm/group/collective_work.py JoinedWork.wait": OWN,
    "comm/group/collective_work.py LocalWork.wait": PEER,
    "comm/group/composed/device_messages.py DeviceMessages._call": PEER,
    "comm/group/composed/device_messages.py _process_item": PEER,
    "comm/group/composed/device_messages.py _run_queue": CLOSED,
    "comm/group/group_work.py GlooWork.get_future": OWN,
    "comm/group/group_work.py GlooWork.wait": PEER,
    "comm/group/group_work.py IsthmusWork.get_future.pass_on": DONE,
    "comm/group/run_program.py _Run.run": OWN,
    "comm/group/vendors/join_vendors.py _run_unless_lost": PEER,
    "comm/process/process_transport.py ProcessTransport.__init__": KILLED,
    "comm/process/process_transport.py ProcessTransport._exit_error": KILLED,
    "comm/process/process_transport.py ProcessTransport._release": KILLED,
    "comm/process/transport_process.py TransportProcess._send_loop": SERVICE,
    "comm/process/transport_process.py TransportProcess.run": SERVICE,
    "comm/process/transport_process_handle.py TransportProcessHandle.wait": KILLED,
    "comm/tcp/acceptor.py Acceptor.close": CLOSED,
    "comm/rdma/rdma_channel.py RdmaChannel.close": "the proxy ends with the channel: shut down, within LINGER_S",
    "comm/rdma/user_space_device.py UserSpaceDevice.close": CLOSED,
    "comm/tcp/connection.py Connection.join": CLOSED,
    "comm/tcp/entrance.py Entrance.close": CLOSED,
    "comm/tcp/peer.py Peer._replace_connection": CLOSED,
    "comm/tcp/peer.py Peer._end_connections": CLOSED,
    "comm/tcp/peer.py Peer.join": CLOSED,
    "comm/tcp/reassembly.py Reassembler.begin_fragment": CLOSED,
    "control/rest/event_stream.py EventSubscription.events": SERVICE,
    "control/service/access/caller_limits.py CallerLimits.turn": OWN,
    "control/service/control_service.py ControlService._tick_loop": SERVICE,
    "control/service/control_service.py ControlService._token_loop": SERVICE,
    "control/service/control_service.py ControlService.close": CLOSED,
    "control/service/notify/notifier.py Notifier._run": SERVICE,
    "control/service/notify/notifier.py Notifier.close": CLOSED,
    "control/service/notify/notifier.py Notifier.step": DONE,
    "control/service/planner_process.py _kill_process": KILLED,
    "control/service/planner_process.py main": SERVICE,
    "control/service/planner_queue.py PlannerQueue._next_task": SERVICE,
    "control/service/planner_queue.py PlannerQueue.close": SERVICE,
    "core/process/rank_runner.py _wait": PROGRAM,
    "core/process/rank_runner.py run": KILLED,
    "core/process/rank_runner.py watch_lease": SERVICE,
    "data/chat_template.py ChatRenderer.__exit__": KILLED,
    "data/chat_template.py ChatRenderer._render": KILLED,
    "rl/process/rollout_decoder.py RolloutDecoder._stage_all": SERVICE,
    "rl/rewards/call_pool.py CallPool.borrow": OWN,
    "rl/rewards/function_process.py FunctionProcess.close": KILLED,
    "rl/rollout/chunk_sender.py ChunkSender._next": SERVICE,
    "rl/rollout/engine_link.py EngineLink._take_turns": SERVICE,
    "rl/rollout/weights_exchange.py WeightsExchange._tick": SERVICE,
    "switch/serve_switch.py serve_switch": SERVICE,
    "train/checkpoint/async_checkpoint_writer.py AsyncCheckpointWriter.begin": OWN,
    "train/checkpoint/async_checkpoint_writer.py AsyncCheckpointWriter.wait": OWN,
    "train/checkpoint/async_checkpoint_writer.py AsyncCheckpointWriter.wait_copied": OWN,
    "train/checkpoint/checkpoint_manager.py CheckpointManager.save": OWN,
    "train/checkpoint/checkpoint_manager.py CheckpointManager.wait": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.begin_snapshot": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.clear": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.drop_after": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.load": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.reserve_slot": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.steps": OWN,
    "train/checkpoint/memory_checkpoint.py MemoryCheckpoint.wait": COPY,
    "train/checkpoint/sites/fetch_shards.py _ask": PEER,
    "train/checkpoint/sites/fetch_shards.py fetch_shards": PEER,
    "train/checkpoint/sites/peer_channel.py PeerChannel.receive_chunks": PEER,
    "train/checkpoint/sites/peer_channel.py PeerChannel.receive_text": PEER,
    "train/checkpoint/sites/peer_channel.py PeerChannel.send_chunks": PEER,
    "train/checkpoint/sites/peer_channel.py PeerChannel.send_text": PEER,
    "train/checkpoint/sites/site_publisher.py SitePublisher._result": PEER,
    "train/checkpoint/snapshot_replicator.py SnapshotReplicator._send": PEER,
    "train/checkpoint/snapshot_replicator.py SnapshotReplicator.wait": PEER,
    "train/checkpoint/snapshot_replicator.py _receive_answer": PEER,
    "train/checkpoint/snapshot_replicator.py _send_answer": PEER,
    "train/checkpoint/snapshot_replicator.py receive_slot": PEER,
    "train/checkpoint/snapshot_replicator.py send_slot": PEER,
    "train/communication/communicator.py Communicator._wait": PEER,
    "train/communication/communicator.py Communicator.wait_program": PEER,
    "train/update/sharding/shard_exchange.py ShardExchange.finish": PEER,
    "train/communication/host_staging.py HostStaging.receive_to_device.land": PEER,
    "train/communication/host_staging.py StagedReceive.wait": PEER,
    "train/communication/send_thread.py PendingWork.__init__": DONE,
    "train/communication/send_thread.py PendingWork.wait": PEER,
    "train/communication/send_thread.py SendThread.drain": PEER,
    "train/communication/send_thread.py _run_queue": SERVICE,
    "train/communication/stage_group.py StageGroup._all_reduce": PEER,
    "train/comparison/check_parallel.py _run": KILLED,
    "train/context_parallel/context_parallel_group.py ContextParallelGroup.wait": PEER,
    "train/context_parallel/gather_attention.py exchange_parts": PEER,
    "train/context_parallel/ring_attention.py _Ring.__iter__": PEER,
    "train/context_parallel/ring_attention.py _RingAttention.backward": PEER,
    "train/expert_parallel/expert_parallel_group.py ExpertParallelGroup.exchange_counts": PEER,
    "train/expert_parallel/expert_parallel_group.py ExpertParallelGroup.wait": PEER,
    "train/expert_parallel/token_exchange.py _Flight.land": PEER,
    "train/liveness/heartbeat.py start_heartbeat.beat": SERVICE,
    "train/liveness/run_lease_watch.py end_with_run_lease.run": SERVICE,
    "train/measure/measure_message.py _ping": PEER,
    "train/measure/measure_message.py _pong": PEER,
    "train/pipeline/virtual_training.py BlockingCommunicator._wait": PEER,
    "train/process/command_worker.py _Program._watch": PROGRAM,
    "train/process/command_worker.py _Program.run": KILLED,
    "train/process/supervisor.py _Supervisor._wait_for_exit": SERVICE,
    "train/process/trainer.py Trainer.verify_checkpoint": OWN,
    "train/tensor_parallel/tensor_parallel_group.py TensorParallelGroup.all_gather_tokens": PEER,
    "train/tensor_parallel/tensor_parallel_group.py TensorParallelGroup.broadcast": PEER,
    "train/tensor_parallel/tensor_parallel_group.py TensorParallelGroup.reduce_scatter_tokens": PEER,
    "wan/background_emulator.py BackgroundLinks._call": SERVICE,
    "wan/background_emulator.py links_in_background": SERVICE,
    "wan/centre/domain_courier.py DomainCourier._run": SERVICE,
    "wan/centre/line_server.py serve_lines": SERVICE,
    "wan/centre/run_centre.py CentreServer.answer": PEER,
    "wan/crossing/crossing_processes.py CrossingProcesses.__exit__": SERVICE,
    "wan/crossing/crossing_processes.py CrossingProcesses._watch": SERVICE,
    "wan/crossing/crossing_processes.py CrossingProcesses._end": KILLED,
    "wan/tenants/run_tenants.py _serve": SERVICE,
    "wan/tenants/run_tenants.py _follow": SERVICE,
    "wan/tenants/tcp_links.py TcpLinks._keep": SERVICE,
    "wan/edge/follow_edge.py follow_edge": SERVICE,
    "wan/emulator.py _report": SERVICE,
    "wan/gateway/run_gateway.py _serve": SERVICE,
    "wan/legs/check_leg.py _done": KIT,
    "wan/link_direction.py LinkDirection.transmit": SERVICE,
    "wan/netns.py Namespaces.kill_processes": KILLED,
    "wan/netns.py _stop_relay": KILLED,
    "wan/packet_relay.py PacketRelay.run": SERVICE,
    "wan/proxy/run_proxy.py _report": SERVICE,
    "wan/tcp_relay.py ProxyConnection._relay": SERVICE,
    "wan/tcp_relay.py TcpRelay._accept": SERVICE,
}
"""What ends each wait without a limit, by file and function."""


def waits_without_limit(tree: ast.AST, place: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield (function, source) of each call that may block for any time, and each pausing loop without a limit."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        where = (*place, node.name) if named else place
        if (isinstance(node, ast.Call) and _blocks(node)) or (isinstance(node, ast.While) and _pauses_forever(node)):
            yield ".".join(where), ast.unparse(node).splitlines()[0]
        yield from waits_without_limit(node, where)


def _blocks(call: ast.Call) -> bool:
    if ast.unparse(call.func) == "subprocess.run":
        return all(keyword.arg != "timeout" for keyword in call.keywords)
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in BLOCKING
    return is_method and not call.args and not call.keywords


def _pauses_forever(loop: ast.While) -> bool:
    calls = (ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call))
    names = (node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(loop) if _is_name(node))
    has_limit = any(word in name.lower() for name in names for word in LIMIT_WORDS)
    return not has_limit and any(call.split(".")[-1] in PAUSES for call in calls)


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def test_a_wait_without_a_limit_says_what_ends_it() -> None:
    """A new one gets a limit and an error, or an entry in `ALLOWED`; an entry whose wait is gone is removed."""
    found = {
        f"{file.relative_to(SOURCE)} {function}": text
        for file in sorted(SOURCE.rglob("*.py"))
        for function, text in waits_without_limit(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert {place: found[place] for place in found.keys() - ALLOWED.keys()} == {}, "give it a limit and an error"
    assert ALLOWED.keys() - found.keys() == set(), "remove the entry"


def test_the_inventory_names_every_file_with_a_wait_without_a_limit() -> None:
    """The page says of each what ends it."""
    page = PAGE.read_text(encoding="utf-8")
    missing = {place.split()[0] for place in ALLOWED if f"src/isthmus/{place.split()[0]})" not in page}
    assert missing == set()


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("event.wait()", True),
        ("event.wait(3)", False),
        ("thread.join()", True),
        ("', '.join(names)", False),
        ("queue.get()", True),
        ("known.get(key)", False),
        ("future.result(timeout=2)", False),
        ("subprocess.run(argv, check=True)", True),
        ("subprocess.run(argv, timeout=60)", False),
        ("while True:\n    time.sleep(1)", True),
        ("while busy():\n    sleep(1)", True),
        ("while time.monotonic() < deadline_s:\n    time.sleep(1)", False),
        ("while True:\n    step()", False),
    ],
)
def test_the_scanner_knows_waits(code: str, is_found: bool) -> None:
    """What blocks without a limit is found, what has one is not."""
    assert bool(list(waits_without_limit(ast.parse(code)))) == is_found
