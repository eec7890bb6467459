"""Seams of the CPU platform, and of the device that is emulated on it."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, Subscriber, subscribe

_HOOKS = "pla_sglang.sim.emulate.hooks"

_on_cpu = functools.partial(Subscriber, group=Group.CPU)
_on_emulated = functools.partial(subscribe, module=_HOOKS, group=Group.EMULATE)

PLATFORM = (
    _on_cpu(
        id="cpu.nixl_rest",
        key="kv_manager.init",
        hook=Hook.BEFORE,
        handler="pla_sglang.plugin.platform.host_fixes:let_nixl_rest",
        why="NIXL's progress thread polls without a pause, or spins for workers that nobody serves: most of a core.",
        verify="tests/e2e/test_cpu_pd.py: an idle pair uses a fraction of a core; KV still moves, both orders",
        exit="When SGLang or NIXL's Python API has a setting for pthrDelay.",
    ),
    _on_cpu(
        id="cpu.nixl_dram",
        key="kv_manager.init",
        hook=Hook.BEFORE,
        handler="pla_sglang.plugin.platform.host_fixes:announce_kv_as_dram",
        why="SGLang declares every KV pool but HiSparse's to NIXL as VRAM, and UCX refuses host memory as VRAM.",
        verify="without it a PD server stops with NIXL_ERR_BACKEND while starting; tests/e2e/test_cpu_pd.py moves KV",
        exit="When SGLang derives kv_data_mem_kinds from the device of the KV pool.",
    ),
    _on_cpu(
        id="cpu.collectives",
        key="group_coordinator.init",
        hook=Hook.BEFORE,
        handler="pla_sglang.plugin.platform.host_fixes:without_gpu_communicators",
        why="With more than one rank the coordinator builds NCCL communicators on torch.cuda whatever the platform.",
        verify="a server with --tp-size 2 --device cpu answers; without the seam it stops in PyNcclCommunicator",
        exit="When GroupCoordinator asks the platform for its communicator (DeviceMixin.get_communicator_class).",
    ),
    _on_cpu(
        id="cpu.pd_early_send",
        key="prefill_mixin.maybe_send_cached_prefix_chunk",
        hook=Hook.AROUND,
        handler="pla_sglang.plugin.platform.host_fixes:early_send_without_event",
        why="A prefill server with the overlap schedule records a torch.cuda.Event on the CPU forward stream.",
        verify="without it a prefill server stops at the second chunk of a prompt; tests/e2e/test_cpu_pd.py has such",
        exit="When SGLang takes the event from torch.get_device_module(device).",
    ),
    _on_cpu(
        id="cpu.reasoning",
        key="reasoner_grammar.init",
        hook=Hook.BEFORE,
        handler="pla_sglang.plugin.platform.host_fixes:offer_mask_functions",
        why="With --reasoning-parser the host asks a grammar backend for functions that only xgrammar's has.",
        verify="without it every grammar is refused: tests/e2e/test_reasoning_grammars.py",
        exit="When ReasonerGrammarBackend takes them from the grammar.",
    ),
    subscribe(
        id="emu.parse",
        group=Group.CLI,
        key="server_args.from_cli_args",
        module="pla_sglang.sim.emulate.arguments",
        hook=Hook.AROUND,
        why="What cannot go together with --pla-emulate, after cli.parse has read our flags.",
        verify="tests/sim/emulate",
        exit="With the emulation.",
    ),
    _on_emulated(
        id="emu.forward",
        key="tp_worker.forward_batch_generation",
        hook=Hook.AROUND,
        handler="around_forward",
        why="Each forward pass occupies the emulated device for the time of its batch.",
        verify="tests/sim/emulate; e2e: step times through HTTP",
    ),
    _on_emulated(
        id="emu.ready",
        key="batch_result.copy_to_cpu",
        why="A result is ready when the emulated device is done; the host waits for it where it waits for a GPU's.",
        verify="as emu.forward",
    ),
    _on_emulated(
        id="emu.idle",
        key="scheduler.on_idle",
        why="Tell a device that waits for work from one that waits for the host.",
        verify="tests/sim/emulate",
    ),
    _on_emulated(
        id="emu.kv_size",
        key="kv_receiver.send_metadata",
        why="How many KV pages a transfer will bring.",
        verify="e2e: KV bandwidth",
    ),
    _on_emulated(
        id="emu.kv_poll",
        key="kv_receiver.poll",
        hook=Hook.AROUND,
        handler="around_receiver_poll",
        why="A transfer is complete once the emulated link has carried it, and fails where it is to.",
        verify="e2e: KV bandwidth, failed transfers",
    ),
    _on_emulated(
        id="emu.kv_send_poll",
        key="kv_sender.poll",
        hook=Hook.AROUND,
        handler="around_sender_poll",
        why="A transfer fails at the prefill instance where it is to.",
        verify="e2e: failed transfers",
    ),
    _on_emulated(
        id="emu.info",
        key="scheduler.get_init_info",
        why="Say in the log and in /server_info that this is no GPU.",
        verify="e2e: /server_info",
    ),
    _on_emulated(
        id="emu.state",
        key="scheduler.get_internal_state",
        why="Step errors and host overhead in /server_info.",
        verify="e2e: /server_info",
    ),
)
