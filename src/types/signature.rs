//! What a rank believes a call to be. It travels in the header of every message, so that ranks
//! that disagree find out from the first bytes instead of hanging.

use super::{Algorithm, CodecSpec, Collective, DType, ReduceOp};
use std::fmt;

/// Version of the wire format: message header, codec layouts, chunk geometry.
pub const FORMAT_VERSION: u8 = 1;

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
}

impl CallSignature {
    /// The signature as it travels.
    pub fn words(&self) -> [u64; SIGNATURE_WORDS] {
        [
            u64::from(FORMAT_VERSION)
                | (self.collective as u64) << 8
                | (self.dtype as u64) << 16
                | u64::from(self.op) << 24
                | (self.algorithm as u64) << 32,
            u64::from(self.root) | u64::from(self.peer) << 32,
            self.count,
            self.sequence,
            self.codec.word(),
        ]
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
        match CodecSpec::from_word(words[4]) {
            Some(codec) => text += &format!(", codec {codec}"),
            None => text += ", codec unknown",
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
