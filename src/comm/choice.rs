//! Which codec carries a call, and why none does. Pure: ranks whose calls and settings are equal
//! decide alike.

use super::Call;
use crate::config::CodecPolicy;
use crate::error::{Error, Result};
use crate::plan::Request;
use crate::types::{CodecChoice, CodecSpec, DType, Extent, ScaleRule};

/// Why a call ran exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exact {
    /// Nobody asked for a codec, or for one inside hosts only and the algorithm has one level.
    NotAsked,
    /// Compression is off for good, by process or communicator.
    Off,
    /// The call asked for it.
    ByCall,
    /// The codec is not for this collective unless it is named.
    Collective,
    /// Codecs carry f32, f16 and bf16.
    DType,
    /// Codecs carry sums and averages.
    Operation,
    /// It is below the smallest size.
    Small,
    /// The codec keeps scales for tensors, and the call names none.
    NoTensor,
    /// A sample was beyond the bound.
    SwitchedOff,
    /// The model of costs said that it does not pay.
    Costs,
}

impl Exact {
    /// Every reason, in numeric order.
    pub const ALL: [Exact; 10] = [
        Exact::NotAsked,
        Exact::Off,
        Exact::ByCall,
        Exact::Collective,
        Exact::DType,
        Exact::Operation,
        Exact::Small,
        Exact::NoTensor,
        Exact::SwitchedOff,
        Exact::Costs,
    ];

    /// As people read it.
    pub const fn name(self) -> &'static str {
        match self {
            Exact::NotAsked => "no codec",
            Exact::Off => "off",
            Exact::ByCall => "by call",
            Exact::Collective => "collective",
            Exact::DType => "data type",
            Exact::Operation => "operation",
            Exact::Small => "small",
            Exact::NoTensor => "no tensor",
            Exact::SwitchedOff => "beyond the bound",
            Exact::Costs => "does not pay",
        }
    }
}

/// The codec of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice {
    pub codec: CodecChoice,
    /// Why it is raw, if it is.
    pub exact: Option<Exact>,
}

impl Choice {
    fn exact(why: Exact) -> Choice {
        Choice {
            codec: CodecSpec::RAW.into(),
            exact: Some(why),
        }
    }
}

/// The codec that carries `call` on a communicator of `nranks` with this policy; `switched_off` if
/// a sample was beyond the bound.
///
/// # Errors
/// Invalid argument if the call asks for a codec that may not carry it.
pub(super) fn choose(
    policy: &CodecPolicy,
    call: &Call,
    nranks: usize,
    switched_off: bool,
) -> Result<Choice> {
    let (codec, asked) = match call.codec {
        Some(spec) if !spec.is_lossy() => return Ok(Choice::exact(Exact::ByCall)),
        Some(spec) => {
            let auto = call.auto;
            let intra = None;
            (CodecChoice { spec, auto, intra }, true)
        }
        None => (policy.codec, false),
    };
    let spec = codec.spec;
    let refused = [Some(spec), codec.intra].into_iter().flatten();
    let refused = refused.filter_map(|spec| refusal(call, spec)).next();
    if asked && let Some((_, why)) = refused {
        return Err(Error::invalid_argument(format!(
            "{} of {}: codec {spec} was asked for, but {why}",
            call.collective, call.dtype
        )));
    }
    let exact = if policy.off {
        Some(Exact::Off)
    } else if !codec.is_lossy() {
        Some(Exact::NotAsked)
    } else if !asked && !policy.collectives.has(call.collective) {
        Some(Exact::Collective)
    } else if let Some((reason, _)) = refused {
        Some(reason)
    } else if !asked && input_bytes(call, nranks) < policy.min_bytes {
        Some(Exact::Small)
    } else if switched_off {
        Some(Exact::SwitchedOff)
    } else {
        None
    };
    Ok(exact.map_or(Choice { codec, exact: None }, Choice::exact))
}

impl Call {
    /// The call with the codec that carries it on a communicator of `nranks` with this policy, where no
    /// sample was beyond its bound: what a planner takes.
    ///
    /// # Errors
    /// Invalid argument if the call asks for a codec that may not carry it.
    pub fn under(&self, policy: &CodecPolicy, nranks: usize) -> Result<Request> {
        Ok(self.request(choose(policy, self, nranks, false)?.codec))
    }
}

/// Bytes of the input of a rank that has one: the same number on all ranks.
fn input_bytes(call: &Call, nranks: usize) -> usize {
    let blocks = match call.collective.input_extent(true) {
        Extent::CountPerRank => nranks,
        Extent::Count | Extent::Unused => 1,
    };
    // `check::shape` has looked for overflow.
    call.count * call.dtype.size() * blocks
}

/// Why this codec may not carry this call.
fn refusal(call: &Call, spec: CodecSpec) -> Option<(Exact, String)> {
    if !spec.is_lossy() {
        return None;
    }
    if !matches!(call.dtype, DType::F32 | DType::F16 | DType::BF16) {
        let why = format!("it carries f32, f16 and bf16 only, not {}", call.dtype);
        return Some((Exact::DType, why));
    }
    if call.collective.reduces() && !call.op.is_additive() {
        let why = format!(
            "rounded values may only be summed or averaged, not {}",
            call.op
        );
        return Some((Exact::Operation, why));
    }
    if matches!(spec.scale, ScaleRule::Tensor { .. })
        && spec.kind.has_scale()
        && call.tensor.is_none()
    {
        let why = "a tensor scale needs the call's tensor id, to know whose scale to keep";
        return Some((Exact::NoTensor, why.into()));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Origin};
    use crate::types::{Collective, ReduceOp, Scalar};

    fn policy(settings: &[(&str, &str)]) -> CodecPolicy {
        let mut config = Config::default();
        for (name, value) in settings {
            config.set(name, value, Origin::Environment).unwrap();
        }
        CodecPolicy::new(&config, true)
    }

    fn call(collective: Collective, dtype: DType, op: ReduceOp, count: usize) -> Call {
        Call {
            op,
            ..Call::new(collective, dtype, count)
        }
    }

    /// The defaults of the drop-in with a codec, call by call: what compresses, and why not.
    #[test]
    fn only_large_float_sums_compress_by_default() {
        use Collective::*;
        use ReduceOp::*;
        let policy = policy(&[("CINCH_CODEC", "dynamic8"), ("CINCH_CODEC_MIN_BYTES", "1M")]);
        let m = 1 << 20;
        let factor = PreMulSum(Scalar::Float(0.5));
        for (collective, dtype, op, count, expected) in [
            (AllReduce, DType::F32, Sum, m / 4, None),
            (AllReduce, DType::F32, Sum, m / 4 - 1, Some(Exact::Small)),
            (AllReduce, DType::F32, Sum, 0, Some(Exact::Small)),
            (AllReduce, DType::F16, Avg, m / 2, None),
            (AllReduce, DType::BF16, factor, m / 2, None),
            // Four ranks: the input has four blocks.
            (ReduceScatter, DType::BF16, Sum, m / 8, None),
            (
                ReduceScatter,
                DType::BF16,
                Sum,
                m / 8 - 1,
                Some(Exact::Small),
            ),
            (AllReduce, DType::F64, Sum, m, Some(Exact::DType)),
            (AllReduce, DType::I32, Sum, m, Some(Exact::DType)),
            (AllReduce, DType::U8, Sum, m, Some(Exact::DType)),
            (AllReduce, DType::F8E4M3, Sum, m, Some(Exact::DType)),
            (AllReduce, DType::F32, Max, m, Some(Exact::Operation)),
            (AllReduce, DType::F32, Min, m, Some(Exact::Operation)),
            (ReduceScatter, DType::F32, Prod, m, Some(Exact::Operation)),
            (AllGather, DType::F32, Sum, m, Some(Exact::Collective)),
            (Broadcast, DType::F32, Sum, m, Some(Exact::Collective)),
            (AllToAll, DType::F32, Sum, m, Some(Exact::Collective)),
            (SendRecv, DType::F32, Sum, m, Some(Exact::Collective)),
            (Reduce, DType::F32, Sum, m, Some(Exact::Collective)),
            (Gather, DType::F32, Sum, m, Some(Exact::Collective)),
            (Scatter, DType::F32, Sum, m, Some(Exact::Collective)),
        ] {
            let call = call(collective, dtype, op, count);
            let choice = choose(&policy, &call, 4, false).unwrap();
            assert_eq!(choice.exact, expected, "{call:?}");
            assert_eq!(choice.codec.spec.is_lossy(), expected.is_none(), "{call:?}");
        }
        let sum = call(AllReduce, DType::F32, Sum, m);
        let choice = choose(&policy, &sum, 4, true).unwrap();
        assert_eq!(choice.exact, Some(Exact::SwitchedOff));
    }

    #[test]
    fn named_collectives_compress_and_the_others_do_not() {
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
            // What moves is not reduced: the operation does not matter.
            let call = call(collective, DType::F32, ReduceOp::Max, 1000);
            let choice = choose(&policy, &call, 4, false).unwrap();
            assert_eq!(choice.codec.spec.is_lossy(), lossy, "{collective}");
        }
        let pickles = call(Collective::AllGather, DType::U8, ReduceOp::Sum, 1 << 20);
        let choice = choose(&policy, &pickles, 4, false).unwrap();
        assert_eq!(choice.exact, Some(Exact::DType));
    }

    #[test]
    fn a_call_decides_for_itself_unless_compression_is_off() {
        let asking = |codec: &str, dtype, op| Call {
            codec: Some(codec.parse().unwrap()),
            ..call(Collective::Broadcast, dtype, op, 3)
        };
        let exact = policy(&[]);
        let lossy = policy(&[("CINCH_CODEC", "dynamic8"), ("CINCH_CODEC_MIN_BYTES", "1M")]);
        let off = policy(&[("CINCH_CODEC", "off")]);
        let call = asking("linear8", DType::F32, ReduceOp::Sum);
        for policy in [&exact, &lossy] {
            // Neither size nor collective matter: it was asked for.
            let choice = choose(policy, &call, 4, false).unwrap();
            assert_eq!(choice.codec.to_string(), "linear8:block=256");
        }
        assert_eq!(
            choose(&off, &call, 4, false).unwrap().exact,
            Some(Exact::Off)
        );
        let raw = asking("raw", DType::F32, ReduceOp::Sum);
        assert_eq!(
            choose(&lossy, &raw, 4, false).unwrap().exact,
            Some(Exact::ByCall)
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
        assert!(
            choose(&exact, &named, 4, false)
                .unwrap()
                .codec
                .spec
                .is_lossy()
        );
        assert_eq!(
            choose(&exact, &Call { codec: None, ..raw }, 4, false)
                .unwrap()
                .exact,
            Some(Exact::NotAsked)
        );
    }
}
