//! Chooses the codec of a call; if the call runs without a codec, gives the reason. Ranks with
//! equal calls and settings make the same choice.

use super::Call;
use crate::config::{CodecPolicy, PolicyCodec};
use crate::error::{Error, Result};
use crate::types::{CodecSetting, CodecSpec, Extent, RawReason, ResolvedCall};

/// The codec of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CodecDecision {
    pub codec: CodecSetting,
    /// The reason why the call runs without a codec; `None` if it has a codec.
    pub raw_reason: Option<RawReason>,
}

impl CodecDecision {
    fn coded(codec: CodecSetting) -> CodecDecision {
        CodecDecision {
            codec,
            raw_reason: None,
        }
    }

    pub(super) fn exact(why: RawReason) -> CodecDecision {
        CodecDecision {
            codec: CodecSetting::RAW,
            raw_reason: Some(why),
        }
    }
}

/// Chooses the codec of `call` on a communicator of `nranks` with this policy. `switched_off` is true if the
/// error of an earlier sample exceeded the bound.
///
/// # Errors
/// Invalid argument if the call names a codec that cannot carry the call, or different codecs inside and
/// between hosts.
pub(super) fn choose(
    policy: &CodecPolicy,
    call: &Call,
    nranks: usize,
    switched_off: bool,
) -> Result<CodecDecision> {
    let asked = match call.codec {
        None => return Ok(choose_by_policy(policy, call, nranks, switched_off)),
        Some(codec) if codec.is_by_level() => {
            return Err(Error::invalid_argument(format!(
                "{}: a call names one codec, not codec {codec}; set CINCH_CODEC to codecs by level",
                call.collective
            )));
        }
        Some(codec) if !codec.is_lossy() => return Ok(CodecDecision::exact(RawReason::ByCall)),
        Some(codec) => codec,
    };
    if let Some((_, why)) = refusal(call, asked) {
        return Err(Error::invalid_argument(format!(
            "{} of {}: codec {} was asked for, but {why}",
            call.collective, call.dtype, asked.inter
        )));
    }
    Ok(if policy.off {
        CodecDecision::exact(RawReason::Off)
    } else if switched_off {
        CodecDecision::exact(RawReason::SwitchedOff)
    } else {
        CodecDecision::coded(asked)
    })
}

/// Chooses the codec of a call that names none: the first of the policy that fits. If none fits, the reason is
/// that of the codec that came nearest.
fn choose_by_policy(
    policy: &CodecPolicy,
    call: &Call,
    nranks: usize,
    switched_off: bool,
) -> CodecDecision {
    if policy.off {
        return CodecDecision::exact(RawReason::Off);
    }
    if !policy.is_lossy() {
        return CodecDecision::exact(RawReason::NotAsked);
    }
    let bytes = input_bytes(call, nranks);
    let mut nearest = (0, RawReason::NotAsked);
    for one in &policy.codecs {
        match misfit(one, call, bytes) {
            None if !one.codec.is_lossy() => return CodecDecision::exact(RawReason::NotAsked),
            None if switched_off => return CodecDecision::exact(RawReason::SwitchedOff),
            None => return CodecDecision::coded(one.codec),
            Some(found) if found.0 > nearest.0 => nearest = found,
            Some(_) => {}
        }
    }
    CodecDecision::exact(nearest.1)
}

/// Returns why a codec of the policy does not fit a call, after the number of conditions that the call
/// has met.
fn misfit(one: &PolicyCodec, call: &Call, bytes: usize) -> Option<(usize, RawReason)> {
    if !one.collectives.has(call.collective) {
        return Some((1, RawReason::Collective));
    }
    if let Some((reason, _)) = refusal(call, one.codec) {
        return Some((2, reason));
    }
    if !one.has_dtype(call.dtype) {
        return Some((3, RawReason::DType));
    }
    match bytes {
        _ if bytes < one.min_bytes => Some((4, RawReason::Small)),
        _ if bytes > one.max_bytes => Some((5, RawReason::Large)),
        _ => None,
    }
}

#[cfg(feature = "internal")]
impl Call {
    /// Resolves the call for planners, with its codec on a communicator of `nranks` with this
    /// policy. Samples that have switched the codec off are not considered.
    ///
    /// # Errors
    /// Invalid argument if the call names a codec that may not carry it.
    pub fn under(&self, policy: &CodecPolicy, nranks: usize) -> Result<ResolvedCall> {
        Ok(self.resolve(choose(policy, self, nranks, false)?.codec))
    }
}

/// Returns the bytes of a rank's input, which are equal on all ranks that have an input.
fn input_bytes(call: &Call, nranks: usize) -> usize {
    let blocks = match call.collective.input_extent(true) {
        Extent::CountPerRank => nranks,
        Extent::Count | Extent::Unused => 1,
    };
    // `check::shape` keeps the product from overflowing.
    call.count * call.dtype.size() * blocks
}

/// Returns why this codec may not carry this call, inside or between hosts.
fn refusal(call: &Call, codec: CodecSetting) -> Option<(RawReason, String)> {
    let mut specs = [codec.inter, codec.intra].into_iter();
    specs.find_map(|spec| refusal_of(call, spec))
}

fn refusal_of(call: &Call, spec: CodecSpec) -> Option<(RawReason, String)> {
    if !spec.is_lossy() {
        return None;
    }
    if !call.dtype.has_codecs() {
        let why = format!("it carries f32, f16 and bf16 only, not {}", call.dtype);
        return Some((RawReason::DType, why));
    }
    if call.collective.reduces() && !call.op.is_additive() {
        let why = format!(
            "rounded values may only be summed or averaged, not {}",
            call.op
        );
        return Some((RawReason::Operation, why));
    }
    if CodecSetting::of(spec).needs_tensor() && call.tensor.is_none() {
        let why = "a tensor scale needs the call's tensor id, to know whose scale to keep";
        return Some((RawReason::NoTensor, why.into()));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CommFacts, Config, Origin};
    use crate::types::{Collective, DType, ReduceOp, Scalar};

    fn policy(settings: &[(&str, &str)]) -> CodecPolicy {
        let mut config = Config::default();
        for (name, value) in settings {
            config.set(name, value, Origin::Environment).unwrap();
        }
        CodecPolicy::new(&config, CommFacts::first(4, 1))
    }

    fn call(collective: Collective, dtype: DType, op: ReduceOp, count: usize) -> Call {
        Call {
            op,
            ..Call::new(collective, dtype, count)
        }
    }

    /// Uses the default policy of the NCCL drop-in when it has a codec.
    #[test]
    fn default_policy_compresses_large_float_sums_only() {
        use Collective::*;
        use ReduceOp::*;
        let policy = policy(&[("CINCH_CODEC", "dynamic8"), ("CINCH_CODEC_MIN_BYTES", "1M")]);
        let m = 1 << 20;
        let factor = PreMulSum(Scalar::Float(0.5));
        for (collective, dtype, op, count, expected) in [
            (AllReduce, DType::F32, Sum, m / 4, None),
            (
                AllReduce,
                DType::F32,
                Sum,
                m / 4 - 1,
                Some(RawReason::Small),
            ),
            (AllReduce, DType::F32, Sum, 0, Some(RawReason::Small)),
            (AllReduce, DType::F16, Avg, m / 2, None),
            (AllReduce, DType::BF16, factor, m / 2, None),
            // The input has a block for each of the four ranks.
            (ReduceScatter, DType::BF16, Sum, m / 8, None),
            (
                ReduceScatter,
                DType::BF16,
                Sum,
                m / 8 - 1,
                Some(RawReason::Small),
            ),
            (AllReduce, DType::F64, Sum, m, Some(RawReason::DType)),
            (AllReduce, DType::I32, Sum, m, Some(RawReason::DType)),
            (AllReduce, DType::U8, Sum, m, Some(RawReason::DType)),
            (AllReduce, DType::F8E4M3, Sum, m, Some(RawReason::DType)),
            (AllReduce, DType::F32, Max, m, Some(RawReason::Operation)),
            (AllReduce, DType::F32, Min, m, Some(RawReason::Operation)),
            (
                ReduceScatter,
                DType::F32,
                Prod,
                m,
                Some(RawReason::Operation),
            ),
            (AllGather, DType::F32, Sum, m, Some(RawReason::Collective)),
            (Broadcast, DType::F32, Sum, m, Some(RawReason::Collective)),
            (AllToAll, DType::F32, Sum, m, Some(RawReason::Collective)),
            (SendRecv, DType::F32, Sum, m, Some(RawReason::Collective)),
            (Reduce, DType::F32, Sum, m, Some(RawReason::Collective)),
            (Gather, DType::F32, Sum, m, Some(RawReason::Collective)),
            (Scatter, DType::F32, Sum, m, Some(RawReason::Collective)),
        ] {
            let call = call(collective, dtype, op, count);
            let choice = choose(&policy, &call, 4, false).unwrap();
            assert_eq!(choice.raw_reason, expected, "{call:?}");
            assert_eq!(choice.codec.is_lossy(), expected.is_none(), "{call:?}");
        }
        let sum = call(AllReduce, DType::F32, Sum, m);
        let choice = choose(&policy, &sum, 4, true).unwrap();
        assert_eq!(choice.raw_reason, Some(RawReason::SwitchedOff));
    }

    #[test]
    fn policy_with_collectives_compresses_these_only() {
        let policy = policy(&[
            ("CINCH_CODEC", "linear8"),
            ("CINCH_CODEC_COLLECTIVES", "all_gather,send_recv"),
        ]);
        for (collective, lossy) in [
            (Collective::AllGather, true),
            (Collective::SendRecv, true),
            (Collective::AllReduce, false),
            (Collective::Broadcast, false),
        ] {
            // The operator does not matter, because nothing is reduced.
            let call = call(collective, DType::F32, ReduceOp::Max, 1000);
            let choice = choose(&policy, &call, 4, false).unwrap();
            assert_eq!(choice.codec.is_lossy(), lossy, "{collective}");
        }
        let pickles = call(Collective::AllGather, DType::U8, ReduceOp::Sum, 1 << 20);
        let choice = choose(&policy, &pickles, 4, false).unwrap();
        assert_eq!(choice.raw_reason, Some(RawReason::DType));
    }

    #[test]
    fn first_rule_that_fits_a_call_gives_its_codec() {
        use Collective::*;
        let by_size = "*=minmax4:min=64M:for=all_reduce,*=dynamic8:min=1M:max=32M:dtype=bf16,\
                       *=cast16:min=0:for=broadcast";
        let but_f32 = "*=raw:dtype=f32,*=linear8:min=0";
        let but_small = "*=raw:max=64K,*=linear8";
        let (k, m) = (1 << 10, 1 << 20);
        for (rules, collective, dtype, bytes, expected) in [
            (
                by_size,
                AllReduce,
                DType::F32,
                64 * m,
                Ok("minmax4:block=256"),
            ),
            (
                by_size,
                AllReduce,
                DType::F32,
                63 * m,
                Err(RawReason::Small),
            ),
            (
                by_size,
                AllReduce,
                DType::BF16,
                32 * m,
                Ok("dynamic8:block=256"),
            ),
            (
                by_size,
                AllReduce,
                DType::BF16,
                33 * m,
                Err(RawReason::Large),
            ),
            (
                by_size,
                ReduceScatter,
                DType::BF16,
                m,
                Ok("dynamic8:block=256"),
            ),
            (by_size, ReduceScatter, DType::F32, m, Err(RawReason::DType)),
            (by_size, Broadcast, DType::F32, 4, Ok("cast16")),
            (
                by_size,
                AllGather,
                DType::F32,
                64 * m,
                Err(RawReason::Collective),
            ),
            (but_f32, AllReduce, DType::F32, m, Err(RawReason::NotAsked)),
            (but_f32, AllReduce, DType::F16, 2, Ok("linear8:block=256")),
            (
                but_small,
                AllReduce,
                DType::F32,
                64 * k,
                Err(RawReason::NotAsked),
            ),
            (
                but_small,
                AllReduce,
                DType::F32,
                65 * k,
                Ok("linear8:block=256"),
            ),
        ] {
            let policy = policy(&[("CINCH_CODEC_RULES", rules)]);
            let blocks = if collective == ReduceScatter { 4 } else { 1 };
            let count = bytes / dtype.size() / blocks;
            let call = call(collective, dtype, ReduceOp::Sum, count);
            let choice = choose(&policy, &call, 4, false).unwrap();
            let found = choice.raw_reason.map_or(Ok(choice.codec.to_string()), Err);
            assert_eq!(found, expected.map(str::to_string), "{call:?}");
        }
    }

    #[test]
    fn call_names_its_codec_unless_compression_is_off() {
        let asking = |codec: &str, dtype, op| Call {
            codec: Some(codec.parse().unwrap()),
            ..call(Collective::Broadcast, dtype, op, 3)
        };
        let exact = policy(&[]);
        let lossy = policy(&[("CINCH_CODEC", "dynamic8"), ("CINCH_CODEC_MIN_BYTES", "1M")]);
        let off = policy(&[("CINCH_CODEC", "off")]);
        let call = asking("linear8", DType::F32, ReduceOp::Sum);
        for policy in [&exact, &lossy] {
            // Neither size nor collective matter where the call names the codec.
            let choice = choose(policy, &call, 4, false).unwrap();
            assert_eq!(choice.codec.to_string(), "linear8:block=256");
        }
        assert_eq!(
            choose(&off, &call, 4, false).unwrap().raw_reason,
            Some(RawReason::Off)
        );
        let raw = asking("raw", DType::F32, ReduceOp::Sum);
        assert_eq!(
            choose(&lossy, &raw, 4, false).unwrap().raw_reason,
            Some(RawReason::ByCall)
        );
        for policy in [&exact, &lossy, &off] {
            let error = choose(
                policy,
                &asking("linear8", DType::I8, ReduceOp::Sum),
                4,
                false,
            );
            assert!(error.unwrap_err().message().contains("not i8"));
            let max = Call {
                collective: Collective::AllReduce,
                ..asking("linear8", DType::F32, ReduceOp::Max)
            };
            assert!(choose(policy, &max, 4, false).is_err());
            let tensor = asking("linear8:tensor=5", DType::F32, ReduceOp::Sum);
            assert!(choose(policy, &tensor, 4, false).is_err());
        }
        let named = Call {
            tensor: Some(7),
            ..asking("linear8:tensor=5", DType::F32, ReduceOp::Sum)
        };
        assert!(choose(&exact, &named, 4, false).unwrap().codec.is_lossy());
        assert_eq!(
            choose(&exact, &Call { codec: None, ..raw }, 4, false)
                .unwrap()
                .raw_reason,
            Some(RawReason::NotAsked)
        );
    }
}
