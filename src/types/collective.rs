//! Collectives: one table with the shape of their buffers, their roots and their in-place rule.

use super::named_enum::named_enum;

/// How many elements a buffer holds, in terms of a call's `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The buffer is not used on this rank.
    Unused,
    /// `count` elements.
    Count,
    /// `count` elements for each rank.
    CountPerRank,
}

impl Extent {
    /// Returns the elements of the buffer, or `None` on overflow.
    pub fn elements(self, count: usize, nranks: usize) -> Option<usize> {
        match self {
            Extent::Unused => Some(0),
            Extent::Count => Some(count),
            Extent::CountPerRank => count.checked_mul(nranks),
        }
    }
}

/// Where input and output may overlap: as NCCL defines its in-place calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InPlace {
    /// Both buffers begin at one address.
    Same,
    /// The input is the caller's own block of the output.
    InputInOutput,
    /// The output is the caller's own block of the input.
    OutputInInput,
    /// The buffers are disjoint.
    Never,
}

/// Which ranks a call names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NamedRanks {
    Nothing,
    Root,
    SenderAndReceiver,
}

/// Where the extents of one buffer hold.
#[derive(Clone, Copy)]
enum ExtentByRole {
    Everywhere(Extent),
    AtRoot(Extent),
    ExceptAtRoot(Extent),
}

impl ExtentByRole {
    const fn on(self, is_root: bool) -> Extent {
        match (self, is_root) {
            (ExtentByRole::Everywhere(extent), _)
            | (ExtentByRole::AtRoot(extent), true)
            | (ExtentByRole::ExceptAtRoot(extent), false) => extent,
            (ExtentByRole::AtRoot(_), false) | (ExtentByRole::ExceptAtRoot(_), true) => {
                Extent::Unused
            }
        }
    }
}

/// A line of the table.
struct CollectiveFacts {
    /// Whether contributions are combined.
    reduces: bool,
    names: NamedRanks,
    input: ExtentByRole,
    output: ExtentByRole,
    in_place: InPlace,
}

const fn moves(
    names: NamedRanks,
    input: ExtentByRole,
    output: ExtentByRole,
    in_place: InPlace,
) -> CollectiveFacts {
    CollectiveFacts {
        reduces: false,
        names,
        input,
        output,
        in_place,
    }
}

const fn reduces(
    names: NamedRanks,
    input: ExtentByRole,
    output: ExtentByRole,
    in_place: InPlace,
) -> CollectiveFacts {
    CollectiveFacts {
        reduces: true,
        ..moves(names, input, output, in_place)
    }
}

use Extent::{Count, CountPerRank};
use ExtentByRole::{AtRoot, Everywhere, ExceptAtRoot};
use NamedRanks::{Nothing, Root, SenderAndReceiver};

named_enum! {
    /// The operation of a call. Call signatures carry the numbers of `cinch_collective_t`.
    Collective as CollectiveFacts {
        /// Every rank gets the reduction of all inputs.
        AllReduce = 0, "all_reduce",
            reduces(Nothing, Everywhere(Count), Everywhere(Count), InPlace::Same);
        /// Every rank gets all inputs, in rank order.
        AllGather = 1, "all_gather",
            moves(Nothing, Everywhere(Count), Everywhere(CountPerRank), InPlace::InputInOutput);
        /// Rank r gets block r of the reduction.
        ReduceScatter = 2, "reduce_scatter",
            reduces(Nothing, Everywhere(CountPerRank), Everywhere(Count), InPlace::OutputInInput);
        /// Every rank gets the root's input.
        Broadcast = 3, "broadcast",
            moves(Root, AtRoot(Count), Everywhere(Count), InPlace::Same);
        /// The root gets the reduction of all inputs.
        Reduce = 4, "reduce",
            reduces(Root, Everywhere(Count), AtRoot(Count), InPlace::Same);
        /// The root gets all inputs, in rank order.
        Gather = 5, "gather",
            moves(Root, Everywhere(Count), AtRoot(CountPerRank), InPlace::InputInOutput);
        /// Rank r gets block r of the root's input.
        Scatter = 6, "scatter",
            moves(Root, AtRoot(CountPerRank), Everywhere(Count), InPlace::OutputInInput);
        /// Rank r gets block r of every rank's input, in rank order.
        AllToAll = 7, "all_to_all",
            moves(Nothing, Everywhere(CountPerRank), Everywhere(CountPerRank), InPlace::Same);
        /// The sender's input goes to one peer.
        SendRecv = 8, "send_recv",
            moves(SenderAndReceiver, AtRoot(Count), ExceptAtRoot(Count), InPlace::Never);
    }
}

impl Collective {
    /// Returns whether contributions are combined.
    pub const fn reduces(self) -> bool {
        self.facts().reduces
    }

    /// Returns whether the call names a root.
    pub const fn has_root(self) -> bool {
        matches!(self.facts().names, NamedRanks::Root)
    }

    /// Returns whether the call is a message: it names a sender and a receiver, and no other rank
    /// takes part.
    pub const fn is_message(self) -> bool {
        matches!(self.facts().names, NamedRanks::SenderAndReceiver)
    }

    /// Returns whether `count` is the size of one rank's block, not of the whole message.
    pub const fn has_blocks(self) -> bool {
        matches!(self.input_extent(true), CountPerRank)
            || matches!(self.output_extent(true), CountPerRank)
    }

    /// Returns the extent of the input buffer on a rank that is (not) the root. The root of a
    /// send/recv is its sender.
    pub const fn input_extent(self, is_root: bool) -> Extent {
        self.facts().input.on(is_root)
    }

    /// Returns the extent of the output buffer on a rank that is (not) the root. The root of a
    /// send/recv is its sender.
    pub const fn output_extent(self, is_root: bool) -> Extent {
        self.facts().output.on(is_root)
    }

    /// Returns how input and output of one rank may overlap.
    pub const fn in_place(self) -> InPlace {
        self.facts().in_place
    }
}
