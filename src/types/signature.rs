//! The signature of a call. The header of every message carries it. Ranks that disagree about a
//! call thus fail at the first bytes instead of hanging.

use super::{
    Algorithm, CallTuning, CodecKind, CodecSpec, Collective, DType, Kernel, KernelIntra, Protocol,
    ReduceOp,
};
use std::fmt;
use std::num::NonZeroU8;

/// Version of the wire format: message header, codec layouts, chunk geometry, scale of averages, peer buffers.
pub const FORMAT_VERSION: u8 = 6;

/// Number of 64-bit words in an encoded signature.
pub const SIGNATURE_WORDS: usize = 5;

/// Index of the sequence number in the words of a signature.
pub(crate) const SEQUENCE_WORD: usize = 3;

/// Bits of the element count in its word; the largest number of channels is above them. No buffer has more bytes.
pub(super) const COUNT_BITS: u32 = 56;

/// Describes a group of calls that runs as one fused call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fused {
    /// Number of calls; 0 for a call that is not fused.
    calls: u32,
    /// Digest of the calls' element counts, in order.
    digest: u32,
}

impl Fused {
    /// Value for a call that is not fused.
    pub const ALONE: Fused = Fused {
        calls: 0,
        digest: 0,
    };

    /// Describes fused calls with these element counts, in order.
    pub fn of(counts: impl Iterator<Item = usize>) -> Fused {
        let (mut calls, mut mixed) = (0, 0u64);
        for count in counts {
            calls += 1;
            mixed = (mixed ^ count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^= mixed >> 32;
        }
        Fused {
            calls,
            digest: mixed as u32,
        }
    }

    fn word(self) -> u64 {
        u64::from(self.calls) | u64::from(self.digest) << 32
    }

    fn from_word(word: u64) -> Fused {
        Fused {
            calls: word as u32,
            digest: (word >> 32) as u32,
        }
    }
}

/// The part of a call that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallSignature {
    /// Collective that the rank runs.
    pub collective: Collective,
    /// Type of the elements.
    pub dtype: DType,
    /// [`ReduceOp::number`]; 0 where nothing is reduced.
    pub op: u8,
    /// Family of the schedule that runs.
    pub algorithm: Algorithm,
    /// Protocol, kernel and channels that the caller requested, or that a launch of several calls has. They decide which
    /// kernel waits for which messages.
    pub tuning: CallTuning,
    /// Root, or the sender of a send/recv.
    pub root: u32,
    /// Receiver of a send/recv, 0 otherwise.
    pub peer: u32,
    /// Calls of a group that run as this one fused call.
    pub fused: Fused,
    /// Element count of the call, as the caller passed it.
    pub count: u64,
    /// Number of earlier calls of this communicator, or of this pair of ranks for a send/recv,
    /// without captured calls. [`CallSignature::CAPTURED`] in a captured call.
    pub sequence: u64,
    /// The codec between hosts.
    pub codec: CodecSpec,
    /// The codec of contributions inside hosts; equal to `codec` if the schedule treats all ranks
    /// alike.
    pub intra: CodecSpec,
}

/// Bits of the element count.
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// Returns 4 bits that stand for a requested protocol and kernel: two bits each, which are 0 for none.
fn kernel_bits(tuning: CallTuning) -> u64 {
    let protocol = tuning.protocol.map_or(0, |protocol| protocol as u64 + 1);
    protocol | tuning.kernel.map_or(0, |kernel| kernel as u64 + 1) << 2
}

/// Returns 8 bits that stand for the largest number of channels.
fn channel_bits(most: Option<NonZeroU8>) -> u64 {
    most.map_or(0, |most| most.get().into())
}

/// Returns the largest number of channels in the word of the count.
fn max_channels(word: u64) -> Option<NonZeroU8> {
    NonZeroU8::new((word >> COUNT_BITS) as u8)
}

/// Returns 24 bits that stand for a codec inside hosts: its number plus 1, and a digest of its parameters.
fn bits_of_intra(codec: CodecSpec) -> u64 {
    let mixed = codec.word().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (codec.kind as u64 + 1) | mixed >> 48 << 8
}

impl CallSignature {
    /// Sequence number of a call that a CUDA graph replays. Ranks may capture and replay graphs at
    /// different points of their order of calls, so a count would differ between them.
    pub const CAPTURED: u64 = u64::MAX;

    /// Encodes the signature.
    pub fn words(&self) -> [u64; SIGNATURE_WORDS] {
        [
            u64::from(FORMAT_VERSION)
                | (self.collective as u64) << 8
                | (self.dtype as u64) << 16
                | u64::from(self.op) << 24
                | (self.algorithm as u64) << 32
                | kernel_bits(self.tuning) << 36
                | self.intra_bits() << 40,
            match has_place(self.collective) {
                true => u64::from(self.root) | u64::from(self.peer) << 32,
                false => self.fused.word(),
            },
            self.count & COUNT_MASK | channel_bits(self.tuning.max_channels) << COUNT_BITS,
            self.sequence,
            self.codec.word(),
        ]
    }

    /// Returns 24 bits that stand for the codec inside hosts: 0 if it equals the codec between
    /// hosts. Otherwise the bits hold the codec's number plus 1, and a digest of its parameters.
    /// Ranks compare the full settings when they join.
    fn intra_bits(&self) -> u64 {
        match self.intra == self.codec {
            true => 0,
            false => bits_of_intra(self.intra),
        }
    }

    /// Decodes a signature. Returns `None` if the words are no signature, or if they hold only a
    /// digest of the codec inside hosts, unless it is one of [`KernelIntra::own_codecs`].
    pub fn from_words(words: &[u64; SIGNATURE_WORDS]) -> Option<CallSignature> {
        let byte = |shift: u32| (words[0] >> shift) as u8;
        if byte(0) != FORMAT_VERSION {
            return None;
        }
        let codec = CodecSpec::from_word(words[4])?;
        let intra = match words[0] >> 40 {
            0 => codec,
            // Proxies plan calls of kernels from their signatures.
            bits => KernelIntra::own_codecs()
                .find(|&intra| bits == bits_of_intra(intra) && intra != codec)?,
        };
        let collective = Collective::from_number(byte(8).into())?;
        let (place, fused) = match has_place(collective) {
            true => (words[1], Fused::ALONE),
            false => (0, Fused::from_word(words[1])),
        };
        Some(CallSignature {
            collective,
            dtype: DType::from_number(byte(16).into())?,
            op: byte(24),
            algorithm: Algorithm::from_number((byte(32) & 15).into())?,
            tuning: CallTuning {
                protocol: match byte(32) >> 4 & 3 {
                    0 => None,
                    number => Some(Protocol::from_number(u32::from(number) - 1)?),
                },
                kernel: match byte(32) >> 6 {
                    0 => None,
                    number => Some(Kernel::from_number(u32::from(number) - 1)?),
                },
                max_channels: max_channels(words[2]),
            },
            root: place as u32,
            peer: (place >> 32) as u32,
            fused,
            count: words[2] & COUNT_MASK,
            sequence: words[SEQUENCE_WORD],
            codec,
            intra,
        })
    }

    /// Returns the collective of an encoded signature, and the number of calls that run as this one; `None` if the
    /// collective is unknown.
    #[inline]
    pub fn collective_calls(words: &[u64; SIGNATURE_WORDS]) -> Option<(Collective, u64)> {
        let collective = Collective::from_number(((words[0] >> 8) as u8).into())?;
        let fused = match has_place(collective) {
            true => Fused::ALONE,
            false => Fused::from_word(words[1]),
        };
        Some((collective, u64::from(fused.calls.max(1))))
    }

    /// Describes a signature that came from a peer, even if its words are invalid.
    pub fn describe(words: &[u64; SIGNATURE_WORDS]) -> String {
        let byte = |shift: u32| (words[0] >> shift) as u8;
        if byte(0) != FORMAT_VERSION {
            return format!("wire format {}", byte(0));
        }
        let collective = Collective::from_number(byte(8).into());
        let name = collective.map_or("unknown", Collective::name);
        let dtype = DType::from_number(byte(16).into()).map_or("unknown", DType::name);
        let number = match words[SEQUENCE_WORD] {
            CallSignature::CAPTURED => "captured call".to_string(),
            number => format!("call {number}"),
        };
        let mut text = format!("{number} {name} of {} {dtype}", words[2] & COUNT_MASK);
        let fused = Fused::from_word(words[1]);
        if collective.is_some_and(|known| !has_place(known)) && fused != Fused::ALONE {
            let Fused { calls, digest } = fused;
            text += &format!(" in {calls} fused calls (counts #{digest:08x})");
        }
        if collective.is_some_and(Collective::reduces) {
            text += &format!(", op {}", ReduceOp::number_name(byte(24)));
        }
        if collective.is_some_and(Collective::has_root) {
            text += &format!(", root {}", words[1] as u32);
        }
        if collective.is_some_and(Collective::is_message) {
            text += &format!(" from {} to {}", words[1] as u32, words[1] >> 32);
        }
        let intra = byte(40)
            .checked_sub(1)
            .map(|number| CodecKind::ALL.get(usize::from(number)))
            .map(|kind| kind.map_or("unknown", |kind| kind.name()));
        let inter = CodecSpec::from_word(words[4]);
        let inter = inter.map_or("unknown".into(), |codec| codec.to_string());
        match intra {
            None => text += &format!(", codec {inter}"),
            Some(intra) => {
                let digest = words[0] >> 48;
                text += &format!(", codec intra={intra} (#{digest:04x}),inter={inter}");
            }
        }
        let algorithm = Algorithm::from_number((byte(32) & 15).into());
        text = text + ", algorithm " + algorithm.map_or("unknown", Algorithm::name);
        if let Some(number) = (byte(32) >> 4).checked_sub(1) {
            let protocol = Protocol::from_number(number.into());
            text = text + ", protocol " + protocol.map_or("unknown", Protocol::name);
        }
        if let Some(most) = max_channels(words[2]) {
            text += &format!(", channels at most {most}");
        }
        text
    }
}

/// Returns whether the signature holds root and peer. For other collectives the same word describes
/// the fused calls.
fn has_place(collective: Collective) -> bool {
    collective.has_root() || collective.is_message()
}

impl fmt::Display for CallSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&CallSignature::describe(&self.words()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signature_survives_words() {
        for (number, collective) in Collective::ALL.into_iter().enumerate() {
            let codec = ["raw", "dynamic8:block=64", "minmax4:seed=9"][number % 3];
            let (root, peer, fused) = match has_place(collective) {
                true => (7, 31, Fused::ALONE),
                false => (0, 0, Fused::of([number, 16].into_iter())),
            };
            let call = CallSignature {
                collective,
                dtype: DType::ALL[number % DType::ALL.len()],
                op: number as u8,
                algorithm: Algorithm::ALL[number % Algorithm::ALL.len()],
                tuning: CallTuning {
                    protocol: [None, Some(Protocol::Simple), Some(Protocol::Ll128)][number % 3],
                    kernel: [None, Some(Kernel::Schedule), Some(Kernel::Fused)][number / 3 % 3],
                    max_channels: NonZeroU8::new((number * 40) as u8),
                },
                root,
                peer,
                fused,
                count: COUNT_MASK - number as u64,
                sequence: 1 << 40,
                codec: codec.parse().unwrap(),
                intra: codec.parse().unwrap(),
            };
            assert_eq!(CallSignature::from_words(&call.words()), Some(call));
            let two_levels = CallSignature {
                intra: "fp8_e4m3".parse().unwrap(),
                ..call
            };
            assert_eq!(CallSignature::from_words(&two_levels.words()), None);
            let mut words = call.words();
            words[0] ^= 0x80;
            assert_eq!(CallSignature::from_words(&words), None);
        }
        assert_eq!(CallSignature::from_words(&[0; SIGNATURE_WORDS]), None);
    }

    #[test]
    fn fused_calls_of_other_counts_have_other_words() {
        let call = |counts: &[usize]| CallSignature {
            collective: Collective::AllReduce,
            dtype: DType::F32,
            op: 0,
            algorithm: Algorithm::Direct,
            tuning: CallTuning::AUTO,
            root: 0,
            peer: 0,
            fused: match counts {
                [] => Fused::ALONE,
                counts => Fused::of(counts.iter().copied()),
            },
            count: 32,
            sequence: 3,
            codec: CodecSpec::RAW,
            intra: CodecSpec::RAW,
        };
        let groups: [&[usize]; 6] = [&[], &[10, 6], &[6, 10], &[5, 5], &[7, 7], &[16, 1, 1]];
        for (index, one) in groups.iter().enumerate() {
            for other in &groups[index + 1..] {
                assert_ne!(call(one).words(), call(other).words(), "{one:?}, {other:?}");
            }
        }
        let text = call(&[10, 6]).to_string();
        assert!(
            text.contains("of 32 f32 in 2 fused calls (counts #"),
            "{text}"
        );
        assert!(!call(&[]).to_string().contains("fused"));
    }

    #[test]
    fn requested_protocols_and_channels_have_other_words_and_are_named() {
        let call = |protocol, channels| CallSignature {
            collective: Collective::Reduce,
            dtype: DType::F32,
            op: 0,
            algorithm: Algorithm::Tree,
            tuning: CallTuning {
                protocol,
                kernel: None,
                max_channels: NonZeroU8::new(channels),
            },
            root: 1,
            peer: 0,
            fused: Fused::ALONE,
            count: 8,
            sequence: 3,
            codec: CodecSpec::RAW,
            intra: CodecSpec::RAW,
        };
        let protocols = [None, Some(Protocol::Simple), Some(Protocol::Ll)];
        let calls = protocols.map(|protocol| [0, 1, 255].map(|most| call(protocol, most)));
        let calls = calls.concat();
        for (index, one) in calls.iter().enumerate() {
            for other in &calls[index + 1..] {
                assert_ne!(one.words(), other.words(), "{one}, {other}");
            }
        }
        let texts = [calls[0].to_string(), calls[8].to_string()];
        assert!(texts[0].ends_with("algorithm tree"), "{}", texts[0]);
        let asked = "reduce of 8 f32, op sum, root 1, codec raw, algorithm tree, protocol ll, channels at most 255";
        assert!(texts[1].ends_with(asked), "{}", texts[1]);
    }

    #[test]
    fn codecs_inside_hosts_have_other_words() {
        let call = |intra: &str| CallSignature {
            collective: Collective::AllReduce,
            dtype: DType::F32,
            op: 0,
            algorithm: Algorithm::Hierarchical,
            tuning: CallTuning::AUTO,
            root: 0,
            peer: 0,
            fused: Fused::ALONE,
            count: 8,
            sequence: 3,
            codec: "dynamic8".parse().unwrap(),
            intra: intra.parse().unwrap(),
        };
        let texts = [
            "dynamic8",
            "raw",
            "linear8",
            "linear8:block=64",
            "linear8:block=1024",
            "dynamic8:block=64",
        ];
        for (index, one) in texts.iter().enumerate() {
            for other in &texts[index + 1..] {
                assert_ne!(call(one).words(), call(other).words(), "{one}, {other}");
            }
        }
        let own = KernelIntra::own_codecs().map(|codec| codec.to_string());
        for intra in own.chain(["dynamic8".to_string()]) {
            let call = call(&intra);
            assert_eq!(CallSignature::from_words(&call.words()), Some(call));
        }
        for intra in ["linear8:block=1024", "linear8:seed=7", "fp8_e4m3"] {
            assert_eq!(CallSignature::from_words(&call(intra).words()), None);
        }
        let text = call("dynamic8").to_string();
        assert!(
            text.contains("codec dynamic8:block=256, algorithm hierarchical"),
            "{text}"
        );
        let text = call("raw").to_string();
        assert!(text.contains("codec intra=raw (#"), "{text}");
        assert!(
            text.contains("),inter=dynamic8:block=256, algorithm"),
            "{text}"
        );
    }
}
