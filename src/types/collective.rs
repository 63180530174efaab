//! Collectives: one table with the shapes of their buffers, their roots, the ranks that contribute to a
//! result, and their in-place rule. Chunking, argument checks, the reference implementation and the benchmark
//! read this table.

use super::named_enum::named_enum;
use std::ops::Range;

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

/// Where input and output may overlap, following NCCL's definition of in-place calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InPlace {
    /// Input and output begin at the same address.
    Same,
    /// The input is the caller's own block of the output.
    InputInOutput,
    /// The output is the caller's own block of the input.
    OutputInInput,
    /// The buffers are disjoint.
    Never,
}

/// Ranks that a call names by number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NamedRanks {
    Nothing,
    Root,
    SenderAndReceiver,
}

/// Returns the ranks whose inputs a reduction combines. The arguments are the rank that gets the result, and
/// the number of ranks.
type ReducedRanks = fn(usize, usize) -> Range<usize>;

fn all_ranks(_rank: usize, nranks: usize) -> Range<usize> {
    0..nranks
}

/// Extent of a buffer, with the ranks on which it applies; elsewhere the buffer is unused.
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
    /// The ranks whose inputs are reduced; `None` if the collective only moves data.
    reduced: Option<ReducedRanks>,
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
        reduced: None,
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
        reduced: Some(all_ranks),
        ..moves(names, input, output, in_place)
    }
}

use Extent::{Count, CountPerRank};
use ExtentByRole::{AtRoot, Everywhere, ExceptAtRoot};
use NamedRanks::{Nothing, Root, SenderAndReceiver};

named_enum! {
    /// The operation of a call. Call signatures carry the numbers. The numbers of `cinch_collective_t` are
    /// equal up to `CINCH_SEND`, and higher by 1 after it, because `CINCH_RECV` has a number of its own.
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
    /// The collectives that all ranks of a communicator call together: all but send/recv.
    pub const OF_ALL_RANKS: [Collective; Collective::ALL.len() - 1] = {
        let mut found = [Collective::ALL[0]; Collective::ALL.len() - 1];
        let (mut from, mut to) = (0, 0);
        while from < Collective::ALL.len() {
            if !Collective::ALL[from].is_message() {
                found[to] = Collective::ALL[from];
                to += 1;
            }
            from += 1;
        }
        found
    };

    /// Returns whether contributions are combined.
    pub const fn reduces(self) -> bool {
        self.facts().reduced.is_some()
    }

    /// Returns the ranks whose inputs are combined in the output of `rank`. If the output has a block for
    /// each rank, `block` selects the block. The root of a send/recv is its sender.
    pub fn contributors(
        self,
        rank: usize,
        block: usize,
        root: usize,
        nranks: usize,
    ) -> Range<usize> {
        match self.facts().reduced {
            Some(ranks) => ranks(rank, nranks),
            None if self.has_one_source() => root..root + 1,
            None => block..block + 1,
        }
    }

    /// Returns whether the root alone has an input. The root of a send/recv is its sender.
    pub const fn has_one_source(self) -> bool {
        matches!(self.facts().input, AtRoot(_))
    }

    /// Returns whether the root alone gets an output.
    pub const fn has_one_target(self) -> bool {
        matches!(self.facts().output, AtRoot(_))
    }

    /// Returns whether all ranks get the same output, which must be equal bit by bit.
    pub fn replicates_output(self) -> bool {
        let contributors = |rank| self.contributors(rank, 0, 0, 2);
        matches!(self.facts().output, Everywhere(_))
            && !self.splits_input()
            && contributors(0) == contributors(1)
    }

    /// Returns whether the input has one block for each rank.
    pub const fn splits_input(self) -> bool {
        matches!(self.input_extent(true), CountPerRank)
    }

    /// Returns whether the output has one block for each rank.
    pub const fn joins_output(self) -> bool {
        matches!(self.output_extent(true), CountPerRank)
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
        self.splits_input() || self.joins_output()
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
