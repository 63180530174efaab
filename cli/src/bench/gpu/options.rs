//! Options of `cinch bench` that apply only to GPU buffers.

use crate::join;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Kind of memory that holds the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BufferPlace {
    /// Host memory.
    Host,
    /// GPU memory.
    Gpu,
}

/// The GPU part of the options of `cinch bench`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Buffers on GPUs, with --device gpu")]
pub struct GpuOptions {
    /// Memory that holds the buffers
    #[arg(long, value_enum, default_value_t = BufferPlace::Host)]
    pub device: BufferPlace,
    /// Number of GPUs to use, from device 0 on [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus: Option<u32>,
    /// Run each rank as a process [default: as a thread]
    #[arg(long)]
    pub procs: bool,
    /// Ranks on each GPU [default: 1]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub ranks_per_gpu: Option<u32>,
    /// Place consecutive ranks on different GPUs, in turn [default: consecutive ranks share a GPU]
    #[arg(long, requires = "ranks_per_gpu")]
    pub cyclic: bool,
    /// Split the ranks evenly into this many simulated hosts. Data between hosts is staged in
    /// pinned memory and sent over the loopback network [default: 1]
    #[arg(long, value_name = "H", value_parser = clap::value_parser!(u32).range(1..=32))]
    pub hosts: Option<u32>,
    /// Measure replays of CUDA graphs [default: launches on a stream]
    #[arg(long)]
    pub graph: bool,
    /// Protocol of the kernels, where they support it: auto, simple, ll or ll128
    #[arg(long, default_value = "auto", value_parser = ["auto", "simple", "ll", "ll128"])]
    pub proto: String,
    /// Kind of kernel, where the call supports it: auto, schedule or fused
    #[arg(long, default_value = "auto", value_parser = ["auto", "schedule", "fused"])]
    pub kernel: String,
    /// Path of a libnccl.so.2 to measure in alternation with cinch at each size
    #[arg(long, value_name = "PATH")]
    pub vs: Option<PathBuf>,
}

impl GpuOptions {
    /// Returns whether the buffers are on GPUs. `ranks` is the value of the option `--ranks`.
    ///
    /// # Errors
    /// Returns an error message that names the options that exclude each other.
    pub fn on_gpus(&self, ranks: Option<u32>) -> Result<bool, String> {
        let said = [
            ("--gpus", self.gpus.is_some()),
            ("--procs", self.procs),
            ("--ranks-per-gpu", self.ranks_per_gpu.is_some()),
            ("--cyclic", self.cyclic),
            ("--hosts", self.hosts.is_some()),
            ("--graph", self.graph),
            ("--proto", self.proto != "auto"),
            ("--kernel", self.kernel != "auto"),
            ("--vs", self.vs.is_some()),
        ];
        match (self.device, ranks) {
            (BufferPlace::Gpu, Some(_)) => Err(
                "--ranks starts ranks on host memory; --device gpu takes --gpus N and \
                 --ranks-per-gpu K"
                    .into(),
            ),
            (BufferPlace::Gpu, None) => match (&self.vs, self.per_gpu()) {
                (Some(_), 2..) => Err(
                    "--vs with --ranks-per-gpu: NCCL takes one rank on each GPU; leave one out"
                        .into(),
                ),
                _ => Ok(true),
            },
            (BufferPlace::Host, _) => match said.iter().find(|(_, said)| *said) {
                Some((name, _)) => Err(format!("{name} needs --device gpu")),
                None => Ok(false),
            },
        }
    }

    /// Returns whether each rank is a process, because of --procs or because a launcher started it.
    pub fn processes(&self) -> bool {
        self.procs || join::launcher().is_some()
    }

    /// Returns the number of simulated hosts.
    pub fn hosts(&self) -> usize {
        self.hosts.unwrap_or(1) as usize
    }

    /// Returns the name of the simulated host of `rank`; `None` without `--hosts`.
    ///
    /// # Errors
    /// Returns an error message if the ranks do not divide evenly into the hosts.
    pub fn host_of(&self, rank: usize, nranks: usize) -> Result<Option<String>, String> {
        match self.hosts() {
            1 => Ok(None),
            hosts if !nranks.is_multiple_of(hosts) => Err(format!(
                "--hosts {hosts} with {nranks} ranks: the ranks must divide evenly into the hosts"
            )),
            hosts => Ok(Some(format!("bench host {}", rank / (nranks / hosts)))),
        }
    }

    /// Returns the device number for `rank` of `nranks`.
    pub fn gpu_of(&self, rank: usize, nranks: usize) -> u32 {
        let gpu = match self.cyclic {
            true => rank % nranks.div_ceil(self.per_gpu()),
            false => rank / self.per_gpu(),
        };
        gpu as u32
    }

    /// Returns the number of ranks on each GPU.
    pub fn per_gpu(&self) -> usize {
        self.ranks_per_gpu.unwrap_or(1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::options::BenchOptions;
    use crate::testing::parsed;

    fn on_gpus(line: &str) -> Result<bool, String> {
        let options: BenchOptions = parsed(&format!("all_reduce {line}"))?;
        options.gpu.on_gpus(options.ranks)
    }

    #[test]
    fn ranks_stand_for_hosts_in_their_order() {
        let gpu = |line: &str| parsed::<BenchOptions>(line).unwrap().gpu;
        let one_host = gpu("all_reduce --device gpu");
        assert_eq!(one_host.host_of(0, 3), Ok(None));
        let gpu = gpu("all_reduce --device gpu --hosts 2");
        let hosts: Vec<_> = (0..4).map(|rank| gpu.host_of(rank, 4).unwrap()).collect();
        assert!(hosts[0].is_some() && hosts[0] == hosts[1] && hosts[2] == hosts[3]);
        assert_ne!(hosts[1], hosts[2]);
        assert!(gpu.host_of(0, 3).unwrap_err().contains("--hosts 2"));
    }

    #[test]
    fn every_gpu_has_as_many_ranks() {
        let gpus = |line: &str, nranks| -> Vec<u32> {
            let options: BenchOptions = parsed(&format!("all_reduce --device gpu {line}")).unwrap();
            (0..nranks)
                .map(|rank| options.gpu.gpu_of(rank, nranks))
                .collect()
        };
        assert_eq!(gpus("", 3), [0, 1, 2]);
        assert_eq!(gpus("--ranks-per-gpu 2", 4), [0, 0, 1, 1]);
        assert_eq!(gpus("--ranks-per-gpu 3 --cyclic", 6), [0, 1, 0, 1, 0, 1]);
        let alone: Result<BenchOptions, String> = parsed("all_reduce --device gpu --cyclic");
        assert!(alone.unwrap_err().contains("--ranks-per-gpu"));
    }

    #[test]
    fn options_for_host_and_gpu_memory_exclude_each_other() {
        assert_eq!(on_gpus(""), Ok(false));
        assert_eq!(on_gpus("--ranks 2"), Ok(false));
        assert_eq!(on_gpus("--device gpu --graph --gpus 8 --procs"), Ok(true));
        assert_eq!(on_gpus("--device gpu --proto ll128"), Ok(true));
        for (line, word) in [
            ("--graph", "--graph needs --device gpu"),
            ("--gpus 2", "--gpus needs"),
            ("--hosts 2", "--hosts needs"),
            ("--vs x.so", "--vs needs"),
            ("--device gpu --ranks 2", "--gpus N"),
            ("--device gpu --vs x.so --ranks-per-gpu 2", "one rank"),
            ("--device tpu", "host"),
            ("--device gpu --proto fast", "ll128"),
        ] {
            let error = on_gpus(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
