//! What a rank believes a call to be. It travels in the header of every message, so that ranks
//! that disagree find out from the first bytes instead of hanging.

use super::{Algorithm, CodecKind, CodecSpec, Collective, DType, ReduceOp};
use std::fmt;

/// Version of the wire format: message header, codec layouts, chunk geometry, boxes between GPUs.
pub const FORMAT_VERSION: u8 = 3;

/// 64-bit words of an encoded signature.
pub const SIGNATURE_WORDS: usize = 5;

/// The part of a call that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallSignature {
    /// What is done.
    pub collective: Collective,
    /// Of which elements.
    pub dtype: DType,
    /// [`ReduceOp::number`]; 0 where nothing is reduced.
    pub op: u8,
    /// By which schedule.
    pub algorithm: Algorithm,
    /// Root, or the sender of a send/recv.
    pub root: u32,
    /// Receiver of a send/recv, 0 otherwise.
    pub peer: u32,
    /// The call's `count`.
    pub count: u64,
    /// How many calls this communicator (for a send/recv: this pair) has made before.
    pub sequence: u64,
    /// The codec that runs.
    pub codec: CodecSpec,
    /// The codec of contributions inside hosts; `codec` where the schedule has one level.
    pub intra: CodecSpec,
}

impl CallSignature {
    /// The signature as it travels.
    pub fn words(&self) -> [u64; SIGNATURE_WORDS] {
        [
            u64::from(FORMAT_VERSION)
                | (self.collective as u64) << 8
                | (self.dtype as u64) << 16
                | u64::from(self.op) << 24
                | (self.algorithm as u64) << 32
                | self.intra_bits() << 40,
            u64::from(self.root) | u64::from(self.peer) << 32,
            self.count,
            self.sequence,
            self.codec.word(),
        ]
    }

    /// 24 bits that tell codecs inside hosts apart: 0 where it is the other one, else its number
    /// plus 1, and a digest of its parameters. Settings are compared in full when ranks join.
    fn intra_bits(&self) -> u64 {
        if self.intra == self.codec {
            return 0;
        }
        let mixed = self.intra.word().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (self.intra.kind as u64 + 1) | mixed >> 48 << 8
    }

    /// The signature that these words are of; `None` if they are of none, or of a call with a codec
    /// of its own inside hosts, of which they hold a digest only.
    pub fn from_words(words: &[u64; SIGNATURE_WORDS]) -> Option<CallSignature> {
        let byte = |shift: u32| (words[0] >> shift) as u8;
        if byte(0) != FORMAT_VERSION || words[0] >> 40 != 0 {
            return None;
        }
        let codec = CodecSpec::from_word(words[4])?;
        Some(CallSignature {
            collective: Collective::from_number(byte(8).into())?,
            dtype: DType::from_number(byte(16).into())?,
            op: byte(24),
            algorithm: *Algorithm::ALL.get(byte(32) as usize)?,
            root: words[1] as u32,
            peer: (words[1] >> 32) as u32,
            count: words[2],
            sequence: words[3],
            codec,
            intra: codec,
        })
    }

    /// Describes words that came from a peer, legal or not.
    pub fn describe(words: &[u64; SIGNATURE_WORDS]) -> String {
        let byte = |shift: u32| (words[0] >> shift) as u8;
        if byte(0) != FORMAT_VERSION {
            return format!("wire format {}", byte(0));
        }
        let collective = Collective::from_number(byte(8).into());
        let name = collective.map_or("unknown", Collective::name);
        let dtype = DType::from_number(byte(16).into()).map_or("unknown", DType::name);
        let mut text = format!("call {} {name} of {} {dtype}", words[3], words[2]);
        if collective.is_some_and(Collective::reduces) {
            text += &format!(", op {}", ReduceOp::number_name(byte(24)));
        }
        if collective.is_some_and(Collective::has_root) {
            text += &format!(", root {}", words[1] as u32);
        }
        if collective == Some(Collective::SendRecv) {
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
        let algorithm = Algorithm::ALL.get(byte(32) as usize);
        text + ", algorithm " + algorithm.map_or("unknown", |a| a.name())
    }
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
    fn words_are_read_back() {
        for (number, collective) in Collective::ALL.into_iter().enumerate() {
            let codec = ["raw", "dynamic8:block=64", "minmax4:seed=9"][number % 3];
            let call = CallSignature {
                collective,
                dtype: DType::ALL[number % DType::ALL.len()],
                op: number as u8,
                algorithm: Algorithm::ALL[number % Algorithm::ALL.len()],
                root: 7,
                peer: 31,
                count: u64::MAX - number as u64,
                sequence: 1 << 40,
                codec: codec.parse().unwrap(),
                intra: codec.parse().unwrap(),
            };
            assert_eq!(CallSignature::from_words(&call.words()), Some(call));
            let two_levels = CallSignature {
                intra: "linear8".parse().unwrap(),
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
    fn codecs_inside_hosts_are_told_apart() {
        let call = |intra: &str| CallSignature {
            collective: Collective::AllReduce,
            dtype: DType::F32,
            op: 0,
            algorithm: Algorithm::Hierarchical,
            root: 0,
            peer: 0,
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
            "dynamic8:block=64",
        ];
        for (index, one) in texts.iter().enumerate() {
            for other in &texts[index + 1..] {
                assert_ne!(call(one).words(), call(other).words(), "{one}, {other}");
            }
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
