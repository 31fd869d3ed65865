#!/usr/bin/env python3
"""Makes and times the calls of stores whose clients are Python's.

Usage: worker.py KIND MOST DIR, with KIND one of mooncake, mooncake-light, nixl; MOST the bytes of the largest call. Reads
questions from stdin and answers on stdout, a line of JSON each; the first line says whether the store is there. What the
libraries print goes to stderr.

Everything here runs in a network namespace of its own that has nothing but loopback: some of these programs listen on
all addresses and cannot be told otherwise.
"""

import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20


def alone_on_the_network():
    new_user, new_net, up, get_flags, set_flags = 0x10000000, 0x40000000, 0x1, 0x8913, 0x8914
    if LIBC.unshare(new_net | (new_user if os.geteuid() else 0)):
        raise OSError(ctypes.get_errno(), "no network namespace for the servers: " + os.strerror(ctypes.get_errno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, get_flags, request), 16)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def server(directory, name, *command):
    """Starts a server that the kernel ends when this process ends."""
    die_with_parent = 1
    log = open(os.path.join(directory, name + ".log"), "wb")
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: LIBC.prctl(die_with_parent, signal.SIGKILL, 0, 0, 0),
    )


def until_listening(process, port, patience=20):
    end = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < end:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{process.args[0]} does not listen: exit status {process.poll()}")


class Memory:
    """Warm memory of the caller."""

    def __init__(self, size):
        self.size = size
        self.map = mmap.mmap(-1, size)
        self.map.write(b"\x5a" * size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.view = memoryview(self.map)


def must(code, what, wanted=0):
    if code != wanted:
        raise RuntimeError(f"{what} answers {code}")


def must_all(codes, what, wanted=0):
    for code in codes:
        must(code, what, wanted)


class Mooncake:
    """The Mooncake store inside this process, with its master beside it."""

    def __init__(self, most, directory):
        os.environ["MC_FORCE_TCP"] = "1"
        from mooncake import store

        self.home = os.path.dirname(store.__file__)
        self.segment = 3 * most + 256 * MIB
        self.master = server(
            directory, "mooncake_master", os.path.join(self.home, "mooncake_master"),
            "-rpc_address", "127.0.0.1", "-rpc_port", "50051", "-metrics_port", "9003",
        )  # fmt: skip
        until_listening(self.master, 50051)
        self.store = store.MooncakeDistributedStore()
        self.open(most, directory)

    def open(self, most, directory):
        answer = self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", self.segment, 64 * MIB, "tcp", "", "127.0.0.1:50051"
        )
        must(answer, "setup")
        self.source, self.target = Memory(most), Memory(most)
        self.registered = False

    def register(self, wanted):
        if self.registered != wanted:
            for memory in (self.source, self.target):
                if wanted:
                    must(self.store.register_buffer(memory.address, memory.size), "register_buffer")
                else:
                    must(self.store.unregister_buffer(memory.address), "unregister_buffer")
            self.registered = wanted

    def before(self, job):
        self.register(job.mode != "register-per-call")
        if job.writes:
            self.forget(job)

    def forget(self, job):
        for key in job.keys:
            self.store.remove(key, True)

    def call(self, job):
        memory = self.source if job.writes else self.target
        if job.mode == "register-per-call":
            must(self.store.register_buffer(memory.address, job.total), "register_buffer")
        addresses = job.addresses(memory.address)
        if job.op == "put" and len(job.keys) == 1:
            must(self.store.put_from(job.keys[0], memory.address, job.bytes), "put_from")
        elif job.op == "put":
            must_all(self.store.batch_put_from(job.keys, addresses, job.sizes), "batch_put_from")
        elif len(job.keys) == 1:
            must(self.store.get_into(job.keys[0], memory.address, job.bytes), "get_into", job.bytes)
        else:
            must_all(self.store.batch_get_into(job.keys, addresses, job.sizes), "batch_get_into", job.bytes)
        if job.mode == "register-per-call":
            must(self.store.unregister_buffer(memory.address), "unregister_buffer")

    def fill(self, job, value):
        self.source.view[: job.total] = value
        self.target.view[: job.total] = bytes(job.total)

    def landed(self, job):
        return self.target.view[: job.total]


class MooncakeLight(Mooncake):
    """Mooncake's light client: the memory is that of a daemon, which it talks to."""

    def open(self, most, directory):
        hot = 1 << max(26, (2 * most - 1).bit_length())
        os.environ["MC_STORE_LOCAL_HOT_CACHE_SIZE"] = str(hot)
        os.environ["MC_STORE_LOCAL_HOT_CACHE_USE_SHM"] = "1"
        self.daemon = server(
            directory, "mooncake_client", os.path.join(self.home, "mooncake_client"),
            "-host", "127.0.0.1", "-port", "50052", "-metadata_server", "P2PHANDSHAKE", "-protocol", "tcp",
            "-master_server_address", "127.0.0.1:50051", "-global_segment_size", str(self.segment),
        )  # fmt: skip
        until_listening(self.daemon, 50052)
        must(self.store.setup_dummy(most + 64 * MIB, 3 * most + 64 * MIB, "127.0.0.1:50052"), "setup_dummy")
        self.source, self.target = Memory(most), Memory(most)
        self.pool = self.store.alloc_from_mem_pool(most)
        if not self.pool:
            raise RuntimeError("alloc_from_mem_pool answers nothing")
        must(self.store.register_buffer(self.pool, most), "register_buffer")

    def before(self, job):
        if job.writes:
            self.forget(job)

    def call(self, job):
        one = len(job.keys) == 1
        if job.op == "put" and one:
            must(self.store.put(job.keys[0], self.source.view[: job.bytes]), "put")
        elif job.op == "put":
            must(self.store.put_batch(job.keys, job.cut(self.source.view)), "put_batch")
        elif job.op == "put_in_place" and one:
            must(self.store.put_from(job.keys[0], self.pool, job.bytes), "put_from")
        elif job.op == "put_in_place":
            must_all(self.store.batch_put_from(job.keys, job.addresses(self.pool), job.sizes), "batch_put_from")
        else:
            if one:
                found = [self.store.get_buffer(job.keys[0])]
            else:
                found = self.store.batch_get_buffer(job.keys)
            for buffer, address in zip(found, job.addresses(self.target.address)):
                if buffer is None:
                    raise RuntimeError("get_buffer answers nothing")
                if job.op == "get_into":
                    ctypes.memmove(address, buffer.ptr(), job.bytes)
            self.found = found if job.checks else None

    def fill(self, job, value):
        super().fill(job, value)
        if job.op == "put_in_place":
            ctypes.memmove(self.pool, value, job.total)

    def landed(self, job):
        if job.op == "view":
            return b"".join(bytes(memoryview(buffer)) for buffer in self.found)
        return self.target.view[: job.total]


class Nixl:
    """NIXL between two agents of this process: a transfer library, with no keys and no store."""

    def __init__(self, most, directory):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.source, self.target, self.slots = Memory(most), Memory(most), Memory(most)
        self.near = nixl_agent("near", nixl_agent_config(backends=["UCX"]))
        self.far = nixl_agent("far", nixl_agent_config(backends=["UCX"]))
        for agent, memories in ((self.near, (self.source, self.target)), (self.far, (self.slots,))):
            for memory in memories:
                agent.register_memory([(memory.address, most, 0, "")], "DRAM")
        self.near.add_remote_agent(self.far.get_agent_metadata())
        self.prepared = {}

    def before(self, job):
        if (job.op, job.shape) not in self.prepared:
            memory, verb = (self.source, "WRITE") if job.writes else (self.target, "READ")
            descriptors = [
                self.near.get_xfer_descs([(at, job.bytes, 0) for at in job.addresses(address)], "DRAM")
                for address in (memory.address, self.slots.address)
            ]
            self.prepared[job.op, job.shape] = self.near.initialize_xfer(verb, *descriptors, "far")

    def call(self, job):
        transfer = self.prepared[job.op, job.shape]
        state = self.near.transfer(transfer)
        while state == "PROC":
            state = self.near.check_xfer_state(transfer)
        must(state, "transfer", "DONE")

    def forget(self, job):
        pass

    fill = Mooncake.fill
    landed = Mooncake.landed


KINDS = {"mooncake": Mooncake, "mooncake-light": MooncakeLight, "nixl": Nixl}


class Job:
    """The call in hand."""

    def __init__(self, mode, op, values, bytes, checks=False):
        self.mode, self.op, self.bytes, self.checks = mode, op, bytes, checks
        self.shape = (values, bytes)
        self.total = values * bytes
        self.writes = op.startswith("put")
        self.keys = [f"{values}x{bytes}-{n}" for n in range(values)]
        self.sizes = [bytes] * values

    def addresses(self, start):
        return [start + n * self.bytes for n in range(len(self.keys))]

    def cut(self, view):
        return [view[at : at + self.bytes] for at in self.addresses(0)]

    def as_op(self, op):
        return Job(self.mode, op, *self.shape, self.checks)


def once(store, job):
    store.before(job)
    start = time.perf_counter_ns()
    store.call(job)
    return (time.perf_counter_ns() - start) / 1e3


def check(store, job):
    value = os.urandom(job.total)
    store.fill(job, value)
    put, get = (job, job.as_op("get_into")) if job.writes else (job.as_op("put"), job)
    once(store, put)
    once(store, get)
    if store.landed(get) != value:
        raise RuntimeError("the bytes that come back are not those that were put")
    store.forget(job)


def burst(store, job, budget_ms, least, most):
    if not job.writes:
        once(store, job.as_op("put"))
    start = time.monotonic()
    for _ in range(3):
        once(store, job)
        if time.monotonic() - start > 0.02:
            break
    samples, end = [], time.monotonic() + budget_ms / 1e3
    while len(samples) < least or len(samples) < most and time.monotonic() < end:
        samples.append(once(store, job))
    store.forget(job)
    return samples


def answer(store, question):
    act, limits = question.pop("do"), [question.pop(name) for name in ("budget_ms", "least", "most")]
    job = Job(**question, checks=act == "check")
    if act == "check":
        check(store, job)
        return {}
    return {"us": burst(store, job, *limits)}


def main():
    kind, most, directory = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what):
        print(json.dumps(what), file=answers, flush=True)

    try:
        alone_on_the_network()
        store = KINDS[kind](int(most), directory)
    except Exception as error:
        return say({"error": f"{type(error).__name__}: {error}"})
    say({"version": f"Python {sys.version.split()[0]}"})
    for line in sys.stdin:
        try:
            say(answer(store, json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
    # No destructors: they wait for servers that end with this process.
    os._exit(0)


main()
