//! All_reduces that a communicator on GPUs has timed, by which the planner decides whether an `auto:` codec pays.
//!
//! The constants of the GPU model are those of H200 GPUs. On other GPUs and links a prediction may be off several times,
//! with a codec otherwise than without. The planner multiplies each prediction by the ratio of measured to predicted time
//! at that size. Ranks agree on times, so that all of them decide alike.

use super::{Planner, Request, gpu};
use crate::error::Result;
use crate::types::{Call, CodecSetting, CodecSpec, Collective, DType, Level};
use std::fmt::Write;

/// Sizes in bytes of timed all_reduces, the smallest first.
pub const TIMED_BYTES: [usize; 3] = [64 << 10, 1 << 20, 8 << 20];

/// Types of timed all_reduces. A type has the ratios of the timed type of its size.
pub const TIMED_DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// A codec runs on GPUs if its time is below this part of the time without it: measurements differ by a few per cent, and a
/// call without a codec is exact.
const WORTH: f64 = 0.95;

/// The decision about an `auto:` codec.
#[derive(Clone, Copy, Debug)]
pub(super) struct AutoChoice {
    /// Seconds with the codec, and without it.
    pub seconds: [f64; 2],
    /// Whether the call runs with the codec.
    pub pays: bool,
}

/// A sum over all ranks, and the longest time that a rank took for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedCall {
    /// The codec; [`CodecSetting::RAW`] for none.
    pub codec: CodecSetting,
    /// Type of the elements.
    pub dtype: DType,
    /// Bytes of the message.
    pub bytes: usize,
    /// Measured seconds; 0 before the measurement.
    pub seconds: f64,
}

impl TimedCall {
    /// Returns the call to time. A codec that keeps scales of a tensor is timed with scales of blocks, because the call has
    /// no tensor.
    pub fn request(&self) -> Request {
        let codec = match self.codec.needs_tensor() {
            true => CodecSetting::of(CodecSpec::of(self.codec.inter.kind)),
            false => self.codec,
        };
        let count = self.bytes / self.dtype.size();
        Call::new(Collective::AllReduce, self.dtype, count).resolve(codec)
    }
}

/// Timed calls, each with the ratio of its measured to its predicted time.
#[derive(Debug, Default)]
pub(super) struct CallRatios(Vec<(TimedCall, f64)>);

impl CallRatios {
    /// Returns the timed calls with the codec of `request` and elements as large as its own. Calls with other parameters of
    /// its codec stand for it if none has the same.
    fn like(&self, request: &Request) -> impl Iterator<Item = &(TimedCall, f64)> {
        let (size, codec) = (request.dtype.size(), request.codec);
        let codec = CodecSetting {
            auto: false,
            ..codec
        };
        let is_same = move |timed: &TimedCall| timed.codec == codec && timed.dtype.size() == size;
        let has_same = self.0.iter().any(|(timed, _)| is_same(timed));
        let kinds = |codec: CodecSetting| Level::ALL.map(|level| codec.at(level).kind);
        let is_like = move |timed: &TimedCall| {
            !has_same && kinds(timed.codec) == kinds(codec) && timed.dtype.size() == size
        };
        let both = self.0.iter();
        both.filter(move |(timed, _)| is_same(timed) || is_like(timed))
    }

    /// Returns the ratio for `request`, whose largest buffer has `bytes` bytes: between two timed sizes on the line through
    /// their ratios over the logarithm of the size, and beyond all timed sizes that of the nearest. `None` if no call with
    /// this codec was timed.
    fn at(&self, request: &Request, bytes: usize) -> Option<f64> {
        let mut below = None;
        for (timed, ratio) in self.like(request) {
            let here = ((timed.bytes as f64).ln(), *ratio);
            if timed.bytes >= bytes.max(1) {
                let (x, (low, left)) = ((bytes.max(1) as f64).ln(), below.unwrap_or(here));
                let share = match here.0 > low {
                    true => (x - low) / (here.0 - low),
                    false => 0.0,
                };
                return Some(left + share * (here.1 - left));
            }
            below = Some(here);
        }
        below.map(|(_, ratio)| ratio)
    }
}

impl Planner {
    /// Makes later calls with an `auto:` codec decide by these timed calls, of which those of one codec and type are in
    /// ascending order of size. All ranks must do so before the same call, with equal times.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn set_call_times(&mut self, timed: &[TimedCall]) -> Result<()> {
        let mut ratios = Vec::with_capacity(timed.len());
        for one in timed {
            ratios.push((*one, one.seconds / self.predict(&one.request())?));
        }
        self.ratios = CallRatios(ratios);
        self.plans.clear();
        self.latest.clear();
        Ok(())
    }

    /// Decides about the `auto:` codec of `request`, whose predicted seconds with it and without it are given. On GPUs no
    /// call is encoded on a guess: without timed calls, and without lines of a tuning table for both, the codec takes
    /// infinitely long.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub(super) fn auto_choice(
        &self,
        request: &Request,
        [coded, raw]: [f64; 2],
    ) -> Result<AutoChoice> {
        if self.limits.gpu.is_none() {
            return Ok(AutoChoice {
                seconds: [coded, raw],
                pays: coded < raw,
            });
        }
        let without = request.without_codec();
        let bytes = gpu::bytes(request, self.limits.nranks);
        let ratios = [request, &without].map(|request| self.ratios.at(request, bytes));
        let seconds = match ratios {
            [Some(of_coded), Some(of_raw)] => [coded * of_coded, raw * of_raw],
            _ if self.has_line(request)? && self.has_line(&without)? => [coded, raw],
            _ => [f64::INFINITY, raw],
        };
        Ok(AutoChoice {
            seconds,
            pays: seconds[0] < WORTH * seconds[1],
        })
    }

    /// Returns whether the tuning table has a line for `request`.
    fn has_line(&self, request: &Request) -> Result<bool> {
        let [_, codec] = self.codecs(request)?;
        let found = self.measured(request, codec.as_deref())?;
        Ok(matches!(found, Ok((_, Some(_)))))
    }

    /// Returns the costs by which `auto:` decides about `request` on GPUs, as text.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub(super) fn describe_call_times(&self, request: &Request) -> Result<String> {
        let bytes = gpu::bytes(request, self.limits.nranks);
        if self.ratios.at(request, bytes).is_none() {
            let has_lines = self.has_line(request)? && self.has_line(&request.without_codec())?;
            return Ok(match has_lines {
                true => "of the table".into(),
                false => "not measured, so no call is encoded; a communicator whose CINCH_CODEC is auto:NAME, or \
                          auto:raw, times calls when it is made"
                    .into(),
            });
        }
        let mut text = String::from(
            "measured all_reduces, the longest of all ranks, with the ratio to the model:",
        );
        for (timed, ratio) in self
            .ratios
            .like(request)
            .chain(self.ratios.like(&request.without_codec()))
        {
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                " {} {} {}K {:.1} us ({ratio:.2});",
                timed.codec,
                timed.dtype,
                timed.bytes >> 10,
                timed.seconds * 1e6,
            );
        }
        text.pop();
        Ok(text)
    }
}

#[cfg(test)]
impl Planner {
    /// Makes `auto:` decide about a codec by the predictions, as if calls took as long as predicted.
    pub(super) fn trust_predictions(&mut self, codec: &str) {
        let timed = |codec: &str, bytes| TimedCall {
            codec: codec.parse().unwrap(),
            dtype: DType::F32,
            bytes,
            seconds: 1.0,
        };
        let both = ["raw", codec].into_iter();
        let timed = both.flat_map(|codec| TIMED_BYTES.map(|bytes| (timed(codec, bytes), 1.0)));
        self.ratios = CallRatios(timed.collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::testing::{gpu_limits, plan_request};

    /// Returns calls of fp32 with ratios of 2, 4 and 1 to the predictions of `planner`, by the codec's place in `codecs`.
    fn timed(planner: &Planner, codecs: [&str; 2], ratios: [[f64; 3]; 2]) -> Vec<TimedCall> {
        let mut found = Vec::new();
        for (codec, ratios) in codecs.into_iter().zip(ratios) {
            for (bytes, ratio) in TIMED_BYTES.into_iter().zip(ratios) {
                let mut call = TimedCall {
                    codec: codec.parse().unwrap(),
                    dtype: DType::F32,
                    bytes,
                    seconds: 0.0,
                };
                call.seconds = ratio * planner.predict(&call.request()).unwrap();
                found.push(call);
            }
        }
        found
    }

    fn planner() -> Planner {
        Planner::new(gpu_limits(2, 132), 0, Isa::Scalar)
    }

    #[test]
    fn ratio_between_sizes_is_on_a_line_and_beyond_them_that_of_the_nearest() {
        let mut planner = planner();
        let calls = timed(&planner, ["raw", "linear8"], [[2.0, 4.0, 1.0], [1.0; 3]]);
        planner.set_call_times(&calls).unwrap();
        let ratio = |bytes: usize, codec: &str| {
            let request = plan_request(Collective::AllReduce, bytes / 4, codec);
            planner.ratios.at(&request, bytes)
        };
        for (bytes, expected) in [
            (4, 2.0),
            (64 << 10, 2.0),
            (256 << 10, 3.0),
            (1 << 20, 4.0),
            (2 << 20, 3.0),
            (8 << 20, 1.0),
            (1 << 30, 1.0),
        ] {
            let found = ratio(bytes, "raw").unwrap();
            assert!((found - expected).abs() < 1e-9, "{bytes}: {found}");
        }
        assert_eq!(ratio(1 << 20, "dynamic8"), None);
        assert_eq!(
            ratio(1 << 20, "linear8:block=512"),
            ratio(1 << 20, "linear8")
        );
        let half = Call::new(Collective::AllReduce, DType::BF16, 1 << 20);
        assert_eq!(
            planner.ratios.at(&half.resolve(CodecSetting::RAW), 2 << 20),
            None
        );
    }

    #[test]
    fn automatic_codec_runs_where_timed_calls_are_faster_with_it() {
        let mut planner = planner();
        let is_coded = |planner: &mut Planner, bytes: usize| {
            let request = plan_request(Collective::AllReduce, bytes / 4, "auto:linear8");
            planner.plan(&request).unwrap().is_coded()
        };
        let large = 64 << 20;
        let predicted =
            |codec| planner.predict(&plan_request(Collective::AllReduce, large / 4, codec));
        assert!(predicted("linear8").unwrap() < predicted("raw").unwrap());
        // Without a measurement, nothing is encoded.
        assert!(!is_coded(&mut planner, large));
        for (ratios, coded) in [
            ([[1.0; 3], [1.0; 3]], true),
            ([[1.0; 3], [100.0; 3]], false),
            ([[1.0, 1.0, 100.0], [100.0; 3]], true),
        ] {
            let calls = timed(&planner, ["raw", "linear8"], ratios);
            planner.set_call_times(&calls).unwrap();
            assert_eq!(is_coded(&mut planner, large), coded, "{ratios:?}");
        }
        assert!(!is_coded(&mut planner, 4 << 10));
        let text = planner.explain(&plan_request(
            Collective::AllReduce,
            large / 4,
            "auto:linear8",
        ));
        let text = text.unwrap();
        assert!(text.contains("linear8:block=256 f32 8192K"), "{text}");
        assert!(text.contains("raw f32 64K"), "{text}");
    }

    #[test]
    fn call_of_a_kept_scale_is_timed_with_scales_of_blocks() {
        let call = TimedCall {
            codec: "linear8:tensor=50".parse().unwrap(),
            dtype: DType::BF16,
            bytes: 1 << 20,
            seconds: 0.0,
        };
        assert!(!call.request().codec.needs_tensor());
        assert_eq!(call.request().count, 1 << 19);
    }
}
