//! Collectives and the shape of their buffers.

use std::fmt;

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Collective {
    /// Every rank gets the reduction of all inputs.
    AllReduce = 0,
    /// Every rank gets all inputs, in rank order.
    AllGather = 1,
    /// Rank r gets block r of the reduction.
    ReduceScatter = 2,
    /// Every rank gets the root's input.
    Broadcast = 3,
    /// The root gets the reduction of all inputs.
    Reduce = 4,
    /// The root gets all inputs, in rank order.
    Gather = 5,
    /// Rank r gets block r of the root's input.
    Scatter = 6,
    /// Rank r gets block r of every rank's input, in rank order.
    AllToAll = 7,
    /// One rank's input goes to one peer.
    SendRecv = 8,
}

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
    /// Elements of the buffer, or `None` on overflow.
    pub fn elements(self, count: usize, nranks: usize) -> Option<usize> {
        match self {
            Extent::Unused => Some(0),
            Extent::Count => Some(count),
            Extent::CountPerRank => count.checked_mul(nranks),
        }
    }
}

impl Collective {
    /// Every collective, in numeric order.
    pub const ALL: [Collective; 9] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::SendRecv,
    ];

    /// The collective with this number.
    pub fn from_number(number: u32) -> Option<Collective> {
        Collective::ALL.get(number as usize).copied()
    }

    /// The collective with this name, as [`Collective::name`] prints it.
    pub fn from_name(name: &str) -> Option<Collective> {
        Collective::ALL
            .into_iter()
            .find(|collective| collective.name() == name)
    }

    /// Snake-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::SendRecv => "send_recv",
        }
    }

    /// Whether contributions are combined.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce
        )
    }

    /// Whether the call names a root.
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter
        )
    }

    /// Shape of the input buffer on a rank that is (not) the root. Of a send/recv, the root is
    /// the sender.
    pub const fn input_extent(self, is_root: bool) -> Extent {
        match self {
            Collective::AllReduce
            | Collective::AllGather
            | Collective::Reduce
            | Collective::Gather => Extent::Count,
            Collective::ReduceScatter | Collective::AllToAll => Extent::CountPerRank,
            Collective::Broadcast | Collective::SendRecv if is_root => Extent::Count,
            Collective::Scatter if is_root => Extent::CountPerRank,
            Collective::Broadcast | Collective::Scatter | Collective::SendRecv => Extent::Unused,
        }
    }

    /// Shape of the output buffer on a rank that is (not) the root. Of a send/recv, the root is
    /// the sender.
    pub const fn output_extent(self, is_root: bool) -> Extent {
        match self {
            Collective::AllReduce
            | Collective::ReduceScatter
            | Collective::Broadcast
            | Collective::Scatter => Extent::Count,
            Collective::AllGather | Collective::AllToAll => Extent::CountPerRank,
            Collective::Reduce if is_root => Extent::Count,
            Collective::Gather if is_root => Extent::CountPerRank,
            Collective::SendRecv if !is_root => Extent::Count,
            Collective::Reduce | Collective::Gather | Collective::SendRecv => Extent::Unused,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
