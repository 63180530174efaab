//! Turns the letters of nccl-tests into options and settings of cinch.

use super::super::gpu::options::{BufferPlace, GpuOptions};
use super::super::options::BenchOptions;
use cinch::Config;
use cinch::config::Origin;

impl BenchOptions {
    /// Returns the options with the letters of nccl-tests turned into cinch's own options and settings.
    ///
    /// # Errors
    /// Returns an error message that names the letter and what to use instead.
    pub fn with_nccl_tests_letters(&self, config: &mut Config) -> Result<BenchOptions, String> {
        let mut options = self.clone();
        let letters = &self.nccl_tests;
        if letters.ngpus.is_some() || letters.nthreads.is_some() {
            let gpus = letters.ngpus.unwrap_or(1) * letters.nthreads.unwrap_or(1);
            options.gpu = GpuOptions {
                device: BufferPlace::Gpu,
                gpus: Some(gpus),
                ..options.gpu
            };
        }
        options.gpu.graph |= letters.cudagraph > 0;
        let on_gpus = options.gpu.device == BufferPlace::Gpu;
        if let Some(refusal) = letters.refusal(on_gpus) {
            return Err(refusal);
        }
        // In nccl-tests 0 is no timeout of its own.
        if let Some(seconds) = letters.timeout.filter(|&seconds| seconds > 0) {
            config
                .set("CINCH_TIMEOUT", &seconds.to_string(), Origin::Program)
                .map_err(|error| format!("-T {seconds}: {}", error.message()))?;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;

    fn adopted(line: &str) -> Result<BenchOptions, String> {
        let options: BenchOptions = parsed(&format!("all_reduce {line}"))?;
        options.with_nccl_tests_letters(&mut Config::default())
    }

    #[test]
    fn command_lines_of_nccl_tests_are_accepted() {
        for line in [
            "-b 8 -e 128M -f 2 -g 8",
            "-b 1M -e 1G -f 2 -g 1 -c 1 -n 20 -w 5 -G 1 -d float",
            "--minbytes 8 --maxbytes 1K --stepfactor 2 --ngpus 2 --nthreads 2 --iters 5 --warmup_iters 1",
            "--run_cycles 3 --parallel_init 1 --check 0 --op sum --datatype half --root 0 --blocking 0",
            "--timeout 10 --average 3 --agg_iters 1 --stream_null 0 --local_register 1 --unalign 0",
            "--report_timestamps 1 --output_file x.json --per_iter_timing 1 --per_iter_skip 2",
        ] {
            assert!(adopted(line).is_ok(), "{line}: {:?}", adopted(line).err());
        }
    }

    #[test]
    fn letters_become_options_of_cinch() {
        let options = adopted("-g 2 -t 4 -G 3").unwrap();
        assert_eq!(options.gpu.device, BufferPlace::Gpu);
        assert_eq!((options.gpu.gpus, options.gpu.graph), (Some(8), true));
        let plain = adopted("").unwrap();
        assert_eq!(
            (plain.gpu.device, plain.gpu.graph),
            (BufferPlace::Host, false)
        );
        let mut config = Config::default();
        let line: BenchOptions = parsed("all_reduce -T 7").unwrap();
        line.with_nccl_tests_letters(&mut config).unwrap();
        assert_eq!(config.timeout.as_secs(), 7);
    }

    #[test]
    fn letters_that_would_change_the_measurement_are_refused_by_name() {
        for line in [
            "-m 4",
            "-a 1",
            "-g 1 -z 1",
            "-y 1",
            "-C 1",
            "-R 2",
            "-x 1",
            "-D 1",
            "-V 8",
            "-M 1",
            "-u 1",
            "-N 0",
            "-N -1",
        ] {
            let letter = &line[line.rfind('-').unwrap().min(line.len() - 4)..];
            let error = adopted(line).expect_err(line);
            assert!(
                error.starts_with(letter.trim()) || error.starts_with("-N -1"),
                "{line}: {error}"
            );
        }
        assert!(adopted("-z 3").is_ok(), "calls on host memory block");
        assert!(adopted("-g 1 --gpus 2").is_err() && adopted("-g 1 --ranks 2").is_err());
    }
}
