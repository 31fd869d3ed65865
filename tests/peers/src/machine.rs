//! What the comparison runs on. Absolute figures mean nothing without it.

use std::{fmt, fs, thread, time::Instant};

use serde::Serialize;

/// The machine, as far as it bears on the figures.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// As the processor names itself.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Whether a hypervisor is under it.
    pub virtual_machine: bool,
    /// All memory, in bytes.
    pub memory: u64,
    /// The kernel's release.
    pub kernel: String,
    /// The load average of the last minute when the run began: what others did.
    pub load_before: f64,
    /// What one look at the clock costs; it is in every sample.
    pub clock_ns: f64,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let of = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim()).to_owned()
        };
        let cpu = Some(of("model name"))
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "unknown processor".into());
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cpu,
            cores: thread::available_parallelism().map_or(0, usize::from),
            virtual_machine: of("flags").split(' ').any(|flag| flag == "hypervisor"),
            memory: memory("MemTotal:"),
            kernel: kernel.trim().to_owned(),
            load_before: load(),
            clock_ns: clock_ns(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.virtual_machine { "virtual machine" } else { "machine" };
        let Machine { cpu, cores, kernel, load_before, .. } = self;
        let memory = self.memory.div_ceil(1 << 30);
        write!(
            f,
            "{cores}-core {kind} ({cpu}, {memory} GiB, Linux {kernel}), load {load_before:.2} before the run"
        )
    }
}

/// Bytes that programs could still get.
pub fn available() -> u64 {
    memory("MemAvailable:")
}

fn memory(field: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib: Option<u64> = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    kib.unwrap_or(0) * 1024
}

fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

fn clock_ns() -> f64 {
    const LOOKS: u32 = 10_000;
    let start = Instant::now();
    let mut last = start;
    for _ in 0..LOOKS {
        last = Instant::now();
    }
    last.duration_since(start).as_nanos() as f64 / f64::from(LOOKS)
}
