"""What each package offers to the others: a name is added or removed here on purpose, never by accident."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SURFACES = {
    "agent": """
        AgentConfig LocalAdapter LocalJobFile SchedulerAdapter WorkerStatus build_image read_images
        template_files render_site check_scheduler draw_key held_devices read_key remove_state_folder run_agent
        submit_local_job
    """,
    "cli": "main",
    "control.coordinator.coordinator": "Coordinator CoordinatorConfig",
    "control.server.run_server": "ServerConfig ServerInfo create_app run_server",
    "data": "Dataset Prompt PromptSet TokenBatch export_tokenizer open_dataset open_job_data open_prompts",
    "plan": """
        Calibration DATA_SHEET DEFAULT_STACK DimensionWeights LogFormat Measurement MeshDegrees ModelProfile Objective
        Observation OverfullStage PlanExport PlanForecast PlanLayout RunTable SearchLimits SearchRequest SearchResult
        SearchStats ShapeTiming StrategyChoice SuggestedChange TIME_MODEL_PARAMETERS Timing TrainingMemory
        TrainingWorkload
        add_measured_run calibrate_chip calibrate_links calibrate_shapes calibration_for choose_strategies
        command_job_text communication_matrix compare_with_forecast draw_plan estimate_s evaluate_chips export_plan
        fit_calibration fitting_changes framework_request is_run_table iteration_estimate_s job_limits layer_matrix
        load_calibration load_runs make_plans memory_table mfu_fraction model_weights overfull_stages
        parse_lengths pipeline_bounds plan_page predict profile_model read_training_log render_chip_scores
        render_communication render_layer_matrix runtime_incompatibility save_calibration score_plan search_plans
        serving_limits stacked_profile stage_memory stage_table suggest_changes summarise_log to_isthmus_runtime
        CandidateRun FitReport PlannedRun default_keys describe_fit fit_memory informative_runs measured_run planned_run
        planned_runs
        ObjectiveWeights StageGroupLoad plan_energy_j stage_group_loads to_megatron to_torchtitan
        with_prior_rates with_searched_schedule
        RolloutRequest choose_rollouts forecast_rollouts plan_rollouts training_choices
    """,
    "render": """
        SPEC_FIELDS StartKind
        CODE_MOUNT IMAGE_LABEL SPEC_FILE Blueprint CodeRegistration Container ContainerUser Image ImageFacts
        RenderedPart Setting SiteRuntime Template TemplateConflictError find_image host_image make_blueprints mount
        oci_config render_part settings_document training_settings
    """,
    "rl": """
        LedgerConfig LedgerSummary TrajectoryLedger advantages check_trajectories correction
        k3_penalty overlong_penalty policy_loss summarise_ledger
    """,
    "schedule": """
        SCHEDULES SEARCHED Hop Operation OperationKind PipelineCosts Schedule SearchedSchedule StageCosts
        add_communication check_schedule dualpipe forward_only
        gpipe interleaved is_last_use make_schedule one_f_one_b overlapped peak_receive_buffers
        schedule_of_text search_schedule text_of_schedule
        warm_up_counts zero_bubble
    """,
    "serve": """
        DecodeEngine DecodeEvent DecodeRequest DecodingEnded DrawToken OnSwitch PagedEngine PagedEngineConfig
        SequenceKey TokenDecoded TokenDistribution draw_number draw_token
    """,
    "sim": """
        CheckpointInterval Failure FailureResult GroupPrices Interference Kernel LinkResult MessageTrace
        PipelineResult ProcessGenerator Replica ReplicaBounds SimulatedLink SimulatedTraining SimulationResult
        StageLoad StageResult SyncCluster SyncServers SyncTime TimelineSpan best_warm_up chrome_trace draw_failures
        price_strategies replica_bounds run_pipeline sync_seconds
        simulate_failures simulate_training simulated_link timeline_page
        DecodeRates DecodeSite RolloutPipeline RolloutResult SiteSpans WeightsWay meet_deadlines simulate_rollouts
    """,
    "site": """
        CLAIMING HOLDING UNSAVED_STEP_S DeviceAllocator DeviceCountAllocator DeviceIdAllocator FetchFiles ForeignPart
        HoldObserved InventoryObserved FetchObserved HoursObserved LocalJob LocalJobSubmitted LocalJobWithdrawn
        LocalJobsObserved LogWarning ObservedWorker OrdersReceived PartKey ProbeObserved QueueObserved RenewRunLease
        ReorderQueue ReportLocalExit RequestCheckpoint ShutdownRequested SiteEvent SiteInstruction SiteMachine SitePart
        SitePartState SiteWorker StartWorker StopWorker SitePlacement TopologyAllocator WorkersObserved WriteRankMap
        awaits_checkpoint check_site explain_part make_allocator node_names victim_name PathObserved outgoing_kbps
    """,
    "strategies": """
        RANK_STRATEGIES STRATEGIES AggregatorKind ElementCounts Message Phase ProgramTurn RankProgram Region Step
        Strategy StrategySteps WorkerGrid check_steps count_elements crossing_elements find_strategy group_steps
        plan_steps rank_program regions steps
    """,
    "switch": """
        Abort Actions Begin StreamSettings ClientState DerivedJobKeys FixedPoint FromSwitch FromWorker
        Instructions Lost PassingWorker PassingPhase MAX_INTEGERS MAX_WORKERS NonFiniteError
        Received SlotPool Start SwitchClient Timer job_number magnitude_bits read_job_keys run_client
        serve_switch
    """,
    "wan": """
        Admission AdmissionFile BackgroundLinks Booking CarriedIn EdgeSettings FarSite FlowMatch GatewayConfig
        GatewaySettings LegTransport Namespaces PathRequest PortRange ProxyConfig TenantsFile TransferBooking UdpSocket
        admit_all answer_probe apply_edge_settings dial edge_settings emulated_namespaces follow_edge format_address
        links_in_background listen listen_for_probes local_address parse_address parse_network probe_link probe_tenancy
        read_edge_state read_proxy_key read_route read_tenants run_gateway run_links run_proxy run_tenants
        write_edge_state LOOPBACK CentreAddress CentreClient CentreConfig CrossingChoice CrossingProcesses LoggedCentre
        LoggedDomain TunnelPlan plan_file_tunnels run_domain
        PathState choose_crossing process_ids read_centre_token run_centre site_crossings
        effective_capabilities management_network unavailable_reason
        MessageArrived NicArrival NicEvent NicFailed NicSettings NicTick PSN_SPAN PostWork RethHeader RoceNic Transmit
        UDP_PORT WorkDone frame_of_payload
    """,
    "noise": "CipherState DatagramCipher KEY_BYTES NUMBER_BYTES NoiseHandshake TAG_BYTES UnauthenticatedError",
    "weights": "DeltaError DeltaSummary apply_delta decode_changes encode_changes write_delta",
}


@pytest.mark.parametrize("package", SURFACES)
def test_the_public_surface_is_pinned(package: str) -> None:
    """Every name that `__all__` offers is listed above and is there; classes and functions are documented."""
    module = importlib.import_module(f"isthmus.{package}")
    assert sorted(module.__all__) == sorted(SURFACES[package].split())
    found = [getattr(module, name) for name in module.__all__]
    assert all(one.__doc__ for one in found if inspect.isclass(one) or inspect.isroutine(one))


def test_the_package_itself_offers_the_client_lazily() -> None:
    """`isthmus.Client` and its companions are documented and pinned; `import isthmus` loads none of them."""
    import isthmus

    assert sorted(isthmus.__all__) == ["Client", "IsthmusError", "JobUpdate", "LogLine"]
    assert all(getattr(isthmus, name).__doc__ for name in isthmus.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Clint'"):
        isthmus.Clint  # noqa: B018
    public = {name for name in vars(isthmus.Client) if not name.startswith("_")}
    methods = "cancel choose close dry_run job jobs logs metrics plans pool submit watch"
    assert public == set(methods.split(" "))
    code = "import sys, isthmus; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert not {"httpx", "pydantic", "yaml", "isthmus.client"} & set(loaded.stdout.split())


def test_a_server_starts_without_the_planner() -> None:
    """Searches run in processes of their own, so that a server is up without loading `isthmus.plan`."""
    code = "import sys, isthmus.control.server.run_server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert not {"isthmus.plan", "isthmus.sim", "isthmus.schedule"} & set(loaded.stdout.split())


def test_every_schedule_has_its_name() -> None:
    """A job file may name these schedules."""
    from isthmus.schedule import SCHEDULES

    assert sorted(SCHEDULES) == ["1f1b", "dualpipe", "gpipe", "interleaved", "overlapped", "zero_bubble"]


def test_the_coordinator_needs_no_server() -> None:
    """A simulation of the pool loads neither the network nor the store."""
    code = "import sys, isthmus.control.coordinator.coordinator; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert not {"fastapi", "uvicorn", "sqlite3", "cryptography"} & set(loaded.stdout.split())
