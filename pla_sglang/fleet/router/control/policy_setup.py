"""Makes the policy of a live fleet, once the first instance has described itself, and lets it learn from reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.observability.recorder import DecisionRecorder, open_record
from pla_sglang.fleet.router.control.requests.moves import MoveOrders
from pla_sglang.fleet.router.control.requests.running_requests import RunningRequests
from pla_sglang.fleet.router.control.scale_orders import ScaleOrders
from pla_sglang.fleet.router.control.workers.discovery import Description
from pla_sglang.fleet.router.control.workers.errors import WorkerError
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.http.bodies import ROLES
from pla_sglang.load.step_times import FittedModels, ReportedSteps
from pla_sglang.policy.common.curve import profile_curve
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.pools import PoolEvent
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.dopd.batching import BatchingKnobs
from pla_sglang.policy.dopd.planner import DopdController
from pla_sglang.policy.interface.decisions import Migrate, PolicySet, PrefillSample, ScaleTo, SetLengthClass, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.measured_steps import InstanceSteps
from pla_sglang.policy.pairs import PairRunner
from pla_sglang.policy.registry import Setup
from pla_sglang.policy.runner import Effects, Refusal
from pla_sglang.policy_packages import build, read_knobs
from pla_sglang.profiles.load import load_profile
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.setup import header_of

logger = logging.getLogger(__name__)
DEFAULT_PROFILE = "h100-llama3.1-8b-tp1"
ROLE_ORDERS = dict(zip(ROLES, (PoolEvent.TO_PREFILL, PoolEvent.TO_DECODE, PoolEvent.UNITE), strict=True))


class RouterEffects(Effects):
    """What the router can do to a live fleet: labels of stateless instances, length classes, moves, and its size.

    Roles of stock instances are fixed at start-up. A label changes at once: requests under way end where they are. A
    late or a repeated change leaves it as it is.

    Args:
        tell_class: tells an instance the class that its view has now.
        orders: takes moves of running requests; None: they are refused.
        scaling: starts and stops instances; None: that is refused.
    """

    def __init__(
        self,
        fleet: FleetView,
        tell_class: Callable[[InstanceView], None],
        orders: MoveOrders | None = None,
        scaling: ScaleOrders | None = None,
    ) -> None:
        self._fleet = fleet
        self._tell_class = tell_class
        self._orders = orders
        self._scaling = scaling

    def set_role(self, action: SetRole, now_s: float) -> Refusal | None:
        instance = action.instance
        if instance.fixed_role:
            return Refusal.UNSUPPORTED
        if action.epoch is not None and action.epoch != instance.role_epoch:
            return Refusal.LATE
        if action.role is instance.role:
            return Refusal.REPEATED
        self._fleet.set_role(instance, action.role, now_s)
        return None

    def set_length_class(self, action: SetLengthClass, now_s: float) -> Refusal | None:
        action.instance.length_class = action.length_class
        self._tell_class(action.instance)
        return None

    def migrate(self, action: Migrate, now_s: float) -> Refusal | None:
        return Refusal.UNSUPPORTED if self._orders is None else self._orders.order_move(action)

    def scale(self, action: ScaleTo, now_s: float) -> Refusal | None:
        return Refusal.UNSUPPORTED if self._scaling is None else self._scaling.scale(action)


class LivePolicy:
    """The policy of one router, with its TTFT predictor and its recording.

    ``runner`` and ``predictor`` are None until the policy is made: no instance has described itself yet.
    ``predict_ttft_s`` stays None where the policy does not predict.

    Args:
        clock: of the devices; it is set once their time scale is known.
        effects: what can be done to the fleet.
        is_connected: whether KV cache can go from the first instance to the second now.
        on_action: called with kind and reason of every fleet action.
        running: the running requests of each instance. Its ``orders`` take moves of these.
    """

    def __init__(
        self,
        knobs: ControlKnobs,
        fleet: FleetView,
        *,
        running: RunningRequests,
        effects: RouterEffects,
        clock: DeviceClock,
        is_connected: Callable[[InstanceView, InstanceView], bool],
        on_action: Callable[[str, str], None],
    ) -> None:
        self.runner: PairRunner | None = None
        self.predictor: TtftPredictor | None = None
        self.predict_ttft_s: Callable[[RequestView, InstanceView], float] | None = None
        self.recorder: DecisionRecorder | None = None
        self.profile = ""
        self.profile_name = ""
        self.kv_bytes_per_token = 0  # by the profile
        self.roles: tuple[Role, ...] = ()  # at the start, as the policy wants them
        self.clock = clock
        self.running, self.orders = running, running.orders
        self.moves_requests = False  # running requests are listed for it
        self._clock_start_s: float | None = None
        self._knobs = knobs
        self._fleet = fleet
        self._effects = effects
        self._is_connected = is_connected
        self._on_action = on_action
        self._record_file: RecordWriter | None = None
        self._steps: dict[int, ReportedSteps] = {}  # by index of the instance
        self._teaches_predictor = False  # the predictor is not the policy's, so it learns here

    def open_recording(self, *, keep: bool, clock_start_s: float) -> None:
        """``keep``: see ``open_record``; ``clock_start_s``: as in ``Header``. Raises ConfigError if the file cannot be
        written."""
        self._clock_start_s = clock_start_s
        if self._knobs.record is not None:
            self._record_file = open_record(self._knobs.record, keep=keep)

    def make(self, description: Description, instances: int) -> PairRunner:
        """``instances``: how many the fleet has now. Raises ConfigError for a profile that is not known."""
        knobs = self._knobs
        profile, time_scale = choose_profile(knobs, description)
        steps = load_profile(profile)
        self.clock.set_scale(time_scale)
        setup = Setup(
            steps=steps,
            kv_capacity_tokens=description.kv_capacity_tokens,
            ttft_slo_s=self.clock.device_s(knobs.slo_ttft_s),
            tpot_slo_s=self.clock.device_s(knobs.slo_tpot_s),
            instances=max(2, instances),
            seed=knobs.seed,
            boundary_tokens=knobs.boundary_tokens,
            riding_tokens=description.riding_tokens,
            small_first=description.small_first,
            stateless=description.kind is InstanceKind.STATELESS,
            migrates=self.orders.move_request is not None,
            scales=False,
            planner=knobs.scaling.planner,
            instances_min=knobs.scaling.instances_min,
            instances_max=knobs.scaling.instances_max or Setup.instances_max,
            plan_interval_s=knobs.scaling.interval_s,
            headroom=knobs.scaling.headroom,
            pressure_interval_s=knobs.pressure_interval_s,
            pressure_cool_down_s=knobs.pressure_cool_down_s,
            pressure_hysteresis=knobs.pressure_hysteresis,
            move_interval_s=knobs.moves.interval_s,
            move_rest_s=knobs.moves.rest_s,
            move_pause_s=knobs.moves.pause_s,
            move_gain=knobs.moves.gain,
            knobs=read_knobs(knobs.policy, knobs.policy_knobs, knobs.scaling.planner),
        )
        self.profile_name, self.profile = profile, f"{profile} x {time_scale:g}"
        self.kv_bytes_per_token = steps.kv_bytes_per_token
        if self._record_file is not None:
            header = header_of(knobs.policy, profile, time_scale, setup, description.engine)
            header.clock_start_s = self._clock_start_s
            self.recorder = DecisionRecorder(self._record_file, header, self._fleet)
        policy = build(knobs.policy, setup)
        self.roles = policy.roles
        self._take_predictor(policy, setup)
        self._list_requests(policy)
        self.runner = PairRunner(
            policy, self._fleet, self._effects, recording=self.recorder, on_action=self._on_action, clock=self.clock
        )
        self.runner.is_connected = self._is_connected
        return self.runner

    def _take_predictor(self, policy: PolicySet, setup: Setup) -> None:
        """That of the policy, or where it has none, one for admission."""
        predictor = getattr(policy.dispatcher, "predictor", None)
        if isinstance(predictor, TtftPredictor):
            self.predictor = predictor
            self.predict_ttft_s = getattr(policy.dispatcher, "predict_ttft_s", predictor.ttft_s)
        else:
            self.predictor, self._teaches_predictor = TtftPredictor({"": profile_curve(setup.steps)}), True

    @property
    def batching(self) -> BatchingKnobs | None:
        """How instances are to batch, where DOPD's planner says so."""
        controllers = () if self.runner is None else self.runner.policy.controllers
        return next((one.batching for one in controllers if isinstance(one, DopdController)), None)

    def _list_requests(self, policy: PolicySet) -> None:
        """For a policy that moves requests; recorded as it sees them."""
        self.moves_requests = policy.moves_requests()
        if not self.moves_requests:
            return
        if not self._knobs.telemetry:
            logger.warning("policy %s moves nothing: requests are listed in load reports (--telemetry)", policy.name)
        decodes = self.running.list_decodes
        self._fleet.read_decodes_from(decodes if self.recorder is None else self.recorder.keep_decodes(decodes))

    def wanted_rows(self) -> Mapping[str, Any] | None:
        """Which rows of running requests instances are asked for; None: none."""
        return self.running.wanted_rows() if self.moves_requests else None

    def order_role(self, instance: InstanceView, role: str, now_s: float, *, epoch: int | None) -> None:
        """An operator wants it in another pool. Where it is there already, or about to be, nothing changes.

        Raises WorkerError: 400 for a role that cannot be, 409 for an instance of a fixed kind or a late order.
        """
        event = ROLE_ORDERS.get(role)
        if event is None:
            raise WorkerError(f"role {role!r} cannot be; allowed: {', '.join(ROLE_ORDERS)}")
        if self.runner is None or instance.fixed_role:
            raise WorkerError(f"{instance.name} is no stateless instance: its role is fixed", status=409)
        if self.runner.order_role(instance, event, now_s, epoch=epoch) is Refusal.LATE:
            text = f"{instance.name} has changed its role since: its epoch is {instance.role_epoch}, not {epoch}"
            raise WorkerError(text, status=409)

    def on_report(self, instance: InstanceView, sample: PrefillSample | None, now_s: float) -> None:
        """An instance has reported its load; ``sample``: the prefill passes that the report tells of."""
        if self.runner is None:
            return
        if instance.token_interval_s is not None:
            self.runner.token_interval(instance, instance.token_interval_s, now_s)
        if sample is not None:
            self.runner.prefilled(sample, now_s)
            if self._teaches_predictor and self.predictor is not None:
                self.predictor.on_prefill(sample)

    def learn_steps(self, worker: Worker) -> None:
        """Takes its step times as its last load report or answer has them; of several ranks, those of the first."""
        view, said = worker.view, worker.description
        if self.runner is None or said is None:
            return
        known = self._steps.get(view.index)
        if known is None:
            known = self._steps[view.index] = self._start_steps(view, said)
        report = worker.load.reports.get(0)
        told = worker.fits if report is None else FittedModels.of_report(report)
        if told is not None:
            known.on_models(told)

    def _start_steps(self, view: InstanceView, description: Description) -> ReportedSteps:
        """Its profile, until it has measured more: with ``--profile auto`` it may be another one than the fleet's."""
        name, _ = choose_profile(self._knobs, description)
        own = name != self.profile_name
        if own:
            view.profile = name
        peers = () if self.runner is None else self.runner.fleet.instances
        return ReportedSteps(InstanceSteps(view, load_profile(name), name, own=own, peers=peers))

    def describe_steps(self, view: InstanceView) -> str | None:
        """Where its step times are from; None before there is a policy, or the instance has told its load."""
        known = self._steps.get(view.index)
        return None if known is None else known.describe()

    def close_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.close_recorder()
        elif self._record_file is not None:
            self._record_file.close()


def choose_profile(knobs: ControlKnobs, description: Description) -> tuple[str, float]:
    """Name and time scale of the step times to start from, given what the first instance says of itself."""
    if knobs.profile != "auto":
        return knobs.profile, knobs.time_scale
    name = description.profile or DEFAULT_PROFILE
    try:
        load_profile(name)
    except ConfigError as error:
        logger.warning("an instance's profile is not known here, %s is taken: %s", DEFAULT_PROFILE, error)
        name = DEFAULT_PROFILE
    return name, description.time_scale
