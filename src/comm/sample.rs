//! Samples: every k-th coded sum is also run exactly on a window, and both results are compared.
//!
//! All ranks must make the same choice whether to keep the codec. They cannot exchange the result of the
//! comparison, because a thread may hold several ranks. So each rank gets all data of the comparison. The
//! exact sum has the same bits on all ranks, and so has a coded all_reduce. An all_gather replicates the
//! window of a coded reduce_scatter.
//!
//! The number of a call decides whether the call is sampled, and from which call on the result counts. On a
//! GPU, a sample waits only for the previous sample.
//!
//! Calls on host memory in groups and captured calls are not sampled. This includes groups of one call,
//! because another rank may have further calls in its group.

use super::choice::{CodecDecision, choose};
use super::{Call, Communicator, DeviceState, Report};
use crate::cpu::{FloatEnvironment, Isa};
use crate::engine::gpu::{GpuEngine, SampleWindows, Sampled};
use crate::engine::{HostEngine, Run};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::UserBuffers;
use crate::plan::SampleWindow;
use crate::reduce;
use crate::sys::log::{self, Level};
use crate::types::{DType, Subsystem};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The samples of one communicator.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    state: Mutex<SamplerState>,
    switched_off: AtomicBool,
}

#[derive(Debug, Default)]
struct SamplerState {
    /// Number of coded sums so far.
    coded: u64,
    /// The latest sample, while its comparison is pending.
    due: PendingSample,
}

#[derive(Clone, Copy, Debug, Default)]
enum PendingSample {
    #[default]
    None,
    /// The call of the sample was admitted and is not queued yet.
    Accepted,
    /// The window of the sample is being copied to the host.
    Queued(SampleWindow),
}

/// How a call runs: its codec, and whether it is sampled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admission {
    pub decision: CodecDecision,
    /// The window that is compared, if the call is sampled.
    pub window: Option<SampleWindow>,
    /// Whether the call counts among the coded sums of which every k-th is sampled.
    counted: bool,
}

/// Interval of checks whether a window has arrived on the host.
const SAMPLE_POLL_INTERVAL: Duration = Duration::from_micros(50);

impl Sampler {
    pub(super) fn has_switched_off(&self) -> bool {
        self.switched_off.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, SamplerState> {
        // Each change leaves the state consistent, so a poisoned lock does not matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Communicator {
    /// Chooses the codec of a call that would run now.
    pub(super) fn choose(&self, call: &Call) -> Result<CodecDecision> {
        let off = self.sampler.has_switched_off();
        choose(&self.policy, call, self.nranks(), off)
    }

    /// Chooses how a call runs. Calls are admitted in their order; `sampled` allows a sample.
    pub(super) fn admit(&self, call: &Call, sampled: bool) -> Result<Admission> {
        let _environment = FloatEnvironment::standard();
        let decision = self.choose(call)?;
        let every = u64::from(self.policy.sample);
        let request = call.resolve(decision.codec);
        let admission = |window, counted| Admission {
            decision,
            window,
            counted,
        };
        if every == 0 || !sampled || !decision.codec.is_lossy() || self.nranks() == 1 {
            return Ok(admission(None, false));
        }
        let mut state = self.sampler.state();
        let number = state.coded;
        let Some(window) = SampleWindow::of(&request, self.nranks(), number / every) else {
            return Ok(admission(None, false));
        };
        state.coded += 1;
        if !number.is_multiple_of(every) {
            return Ok(admission(None, true));
        }
        let collected = self.collect(&mut state);
        let decision = collected
            .and_then(|()| self.choose(call))
            .inspect_err(|_| state.coded -= 1)?;
        let window = decision.codec.is_lossy().then_some(window);
        if window.is_some() && self.gpu_context().is_some() {
            state.due = PendingSample::Accepted;
        }
        Ok(Admission {
            decision,
            window,
            counted: true,
        })
    }

    /// Undoes [`Communicator::admit`] of a refused call, so that the next coded sum gets its
    /// number. Other ranks have not counted the refused call.
    pub(super) fn rollback(&self, admission: &Admission) {
        if !admission.counted {
            return;
        }
        let mut state = self.sampler.state();
        state.coded -= 1;
        if admission.window.is_some() {
            state.due = PendingSample::None;
        }
    }

    /// Compares the windows of the previous sample, unless they have been compared already.
    fn collect(&self, state: &mut SamplerState) -> Result<()> {
        match std::mem::take(&mut state.due) {
            PendingSample::None => Ok(()),
            PendingSample::Accepted => {
                state.due = PendingSample::Accepted;
                Err(Error::invalid_usage(format!(
                    "a group has more coded sums than CINCH_CODEC_SAMPLE={}: raise the number",
                    self.policy.sample
                )))
            }
            PendingSample::Queued(window) => {
                let DeviceState::Gpu(gpu) = &self.state else {
                    return Ok(());
                };
                // An error fails the communicator: without the comparison this rank could choose
                // differently from the other ranks.
                let [exact, coded] =
                    self.fail_on_error(self.await_windows(gpu.windows()?, &window))?;
                self.compare_sample(&window, &exact, &coded);
                Ok(())
            }
        }
    }

    /// Waits until the exact and the coded window of the previous sample are on the host.
    fn await_windows(
        &self,
        windows: &SampleWindows,
        window: &SampleWindow,
    ) -> Result<[Vec<u8>; 2]> {
        let since = Instant::now();
        while !windows.has_arrived()? {
            self.check_fault()?;
            if since.elapsed() > self.config.timeout {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "the coded sum that was sampled has not ended in {:?} (CINCH_TIMEOUT)",
                        self.config.timeout
                    ),
                ));
            }
            std::thread::sleep(SAMPLE_POLL_INTERVAL);
        }
        Ok(windows.read(window))
    }

    /// Queues a sampled call on a GPU.
    pub(super) fn sample_on(
        &self,
        windows: &SampleWindows,
        engine: &mut GpuEngine,
        sampled: &Sampled<'_>,
    ) -> Result<Report> {
        let report = windows.start(engine, sampled)?;
        self.sampler.state().due = PendingSample::Queued(*sampled.window());
        Ok(report)
    }

    /// Runs a sampled call on host memory, and compares the window at once.
    pub(super) fn sample(
        &self,
        engine: &mut HostEngine,
        mut run: Run<'_>,
        window: &SampleWindow,
    ) -> Result<Report> {
        let mut exact = vec![0; window.bytes()];
        let parts = exact.chunks_exact_mut(window.part_bytes());
        for (part, place) in parts.zip(window.input_places()) {
            run.buffers().read_input(place, part);
        }
        let report = engine.drive(&mut run)?;
        let mut own = vec![0; window.part_bytes()];
        run.buffers().read_output(window.output_place(), &mut own);
        drop(run);
        let bytes = exact.len();
        let run = engine.prepare(
            window.exact_sum(),
            UserBuffers::in_place(&mut exact, 0, bytes)?,
        )?;
        engine.run(run)?;
        let coded = match window.gather() {
            None => own,
            Some(gather) => {
                let mut all = vec![0; window.bytes()];
                let run = engine.prepare(gather, UserBuffers::new(&own, &mut all))?;
                engine.run(run)?;
                all
            }
        };
        self.compare_sample(window, &exact, &coded);
        Ok(report)
    }

    /// Records the error of a sample, and switches the codec off if the error exceeds the bound.
    fn compare_sample(&self, window: &SampleWindow, exact: &[u8], coded: &[u8]) {
        let SampleComparison {
            error,
            compared,
            lost,
        } = compare(window.dtype(), exact, coded);
        let _label = self.label_log();
        let me = &self.peers()[self.rank()];
        let of = format!(
            "{me}: a coded sum of communicator \"{}\"",
            self.config.comm_name
        );
        if compared == 0 && lost > 0 {
            return log::line(
                Level::Warn,
                format_args!(
                    "{of} came back not finite in all of {lost} elements whose exact sums are \
                     finite: not counted as a sample"
                ),
            );
        }
        self.counters.change(|stats| {
            stats.sampled += 1;
            stats.worst_error = stats.worst_error.max(error);
        });
        let left_out = match lost {
            0 => String::new(),
            lost => format!(", without {lost} elements that are finite only exactly"),
        };
        let what = format!(
            "{of} is off by {error:.3e} of its exact RMS on {} bytes{left_out}",
            window.bytes()
        );
        if error <= self.policy.bound {
            return log::line_of(Subsystem::Coll, Level::Info, format_args!("{what}"));
        }
        self.sampler.switched_off.store(true, Ordering::Relaxed);
        self.counters.change(|stats| stats.switched_off = true);
        log::line(
            Level::Warn,
            format_args!(
                "{what}, more than CINCH_CODEC_BOUND={}: calls are exact from now on",
                self.policy.bound
            ),
        );
    }
}

/// Comparison of a coded window with its exact sum.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SampleComparison {
    /// The RMS of the differences over the RMS of the exact sums.
    error: f64,
    /// Elements that are finite in both results; other elements are left out.
    compared: usize,
    /// Elements that are finite in the exact sum only. They do not count as an error of the codec:
    /// a non-finite element turns its whole block into NaN. Under a tensor scale it turns the whole
    /// chunk into NaN. That element may be outside the window, and loss scaling makes such steps
    /// common.
    lost: usize,
}

fn compare(dtype: DType, exact: &[u8], coded: &[u8]) -> SampleComparison {
    let widen = |bytes: &[u8]| {
        let mut wide = vec![0f32; bytes.len() / dtype.size()];
        reduce::widen(dtype, Isa::Scalar, bytes, &mut wide);
        wide
    };
    let (mut off, mut all) = (0.0, 0.0);
    let (mut compared, mut lost) = (0, 0);
    for (exact, coded) in widen(exact).into_iter().zip(widen(coded)) {
        let (exact, coded) = (f64::from(exact), f64::from(coded));
        if exact.is_finite() && coded.is_finite() {
            off += (exact - coded).powi(2);
            all += exact.powi(2);
            compared += 1;
        } else if exact.is_finite() {
            lost += 1;
        }
    }
    let error = match off {
        0.0 => 0.0,
        _ => (off / all).sqrt(),
    };
    SampleComparison {
        error,
        compared,
        lost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(exact: &[f32], coded: &[f32]) -> SampleComparison {
        let bytes = |all: &[f32]| -> Vec<u8> { all.iter().flat_map(|x| x.to_le_bytes()).collect() };
        compare(DType::F32, &bytes(exact), &bytes(coded))
    }

    #[test]
    fn element_not_finite_in_one_result_is_left_out() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (exact, coded, compared, lost) in [
            ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 3, 0),
            ([1.0, nan, 3.0], [1.0, nan, 3.0], 2, 0),
            ([1.0, nan, 3.0], [nan, nan, 3.0], 1, 1),
            ([1.0, 2.0, 3.0], [nan, inf, -inf], 0, 3),
            ([nan, inf, -inf], [1.0, 2.0, 3.0], 0, 0),
        ] {
            let found = of(&exact, &coded);
            assert_eq!((found.compared, found.lost), (compared, lost), "{found:?}");
        }
    }

    #[test]
    fn error_is_relative_to_the_exact_sum() {
        let error = |exact: &[f32], coded: &[f32]| of(exact, coded).error;
        assert_eq!(error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(error(&[3.0, 4.0], &[0.0, 0.0]), 1.0);
        assert!((error(&[3.0, 4.0], &[3.0, 4.5]) - 0.1).abs() < 1e-12);
        assert_eq!(error(&[0.0], &[0.0]), 0.0);
        assert_eq!(error(&[0.0], &[1.0]), f64::INFINITY);
        assert_eq!(error(&[f32::NAN, 1.0], &[1.0, 1.0]), 0.0);
        assert_eq!(error(&[1.0, 1.0], &[f32::INFINITY, 0.0]), 1.0);
    }
}
