//! # How a way is chosen on GPUs
//!
//! Calls on GPUs differ in four things: the algorithm, the protocol, the number of blocks and the size
//! of a chunk: a [`Way`](crate::plan::Way). (The strands of a ring follow from these, the slots that there
//! is memory for and the collective; `--explain` shows `ring/4` for four.) Which is the fastest is looked
//! up, in this order:
//!
//! 1. What was asked for: `Call::algorithm`, `CINCH_ALGO`, `CINCH_PROTO`, `CINCH_GPU_CHANNELS`. Of what
//!    that leaves open the cost model chooses.
//! 2. A tuning table for exactly this model of GPU, number of ranks and kind of links. Those of the
//!    library are in `src/plan/tuned`, listed in `src/plan/tuning/embedded.rs`; `CINCH_TUNING=PATH`
//!    takes another one where it fits, `CINCH_TUNING=off` none. All ranks say their GPU and links when they join,
//!    and compare the file's fingerprint: a table counts on all ranks or on none.
//! 3. The cost model, where no table fits, where it has no line for the collective and the codec, where
//!    it leaves the size to the model because kernels have changed since, or where its way cannot be
//!    taken here (less buffer memory, links that tear lines). Its constants are fitted to the H200.
//!
//! `cinch bench --device gpu --explain` ends each size with the line of the table that decided, or with
//! why the model did.
//!
//! # A table
//!
//! [`Table::parse`](crate::plan::Table::parse) has the format. A line is a range of sizes, by collective
//! and by what the wire carries: the codec, and the bytes of an element before it. Ranges of one
//! collective and codec meet without a gap, and each has the times measured at its ends, so that two
//! neighbours have one time where they meet, or two that differ by little where a table is of several runs:
//! no cliff. A message of up to 16 times the last size goes that size's way, each byte of it taking as long;
//! what is larger still is left to the model. A test walks the tables of the library, and the
//! model, and fails where a larger message is faster than a smaller one by more than 5 %.
//!
//! # Measuring one
//!
//! `cinch tune --device gpu -o FILE` measures replays of graphs, the time of a repetition being that of
//! its slowest rank, and all ways of one size take turns. Sizes are first a factor of 4 apart; then the
//! middles of neighbours that chose differently are measured until these are a factor of 1.25 apart or
//! the time is spent. Of ways that differ by less than 1 % that with the fewest blocks is taken. Between two sizes with different choices the border is where the lines through
//! both ways' times cross; if the time there is above that of the larger size by more than 5 %, it is
//! measured too, however close the two are. A size at which the next larger one's way is faster by more than 5 % takes
//! that way. Beside the table lie all measurements, as lines of JSON.
//!
//! To make a table part of the library, put the file into `src/plan/tuned` and add its line to the list.
