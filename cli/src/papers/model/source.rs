//! The speed-up model of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", section
//! 5, with all its constants. Times are in milliseconds, as in the paper.

/// Returns the milliseconds that moving `bytes` takes at `rate` GiB/s.
pub fn transfer(bytes: f64, rate: f64) -> f64 {
    bytes / f64::from(1u32 << 30) / rate * 1e3
}

/// Width of the values that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Values are sent as fp32.
    Bits32,
    /// Values are sent in one of the 8-bit types.
    Bits8,
}

/// A framework and its speed on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Framework {
    /// Name of the framework.
    pub name: &'static str,
    /// Milliseconds of one pass through the whole network.
    pub pass: f64,
}

/// The two frameworks whose speed-up the paper extrapolates.
pub const FRAMEWORKS: [Framework; 2] = [
    Framework {
        name: "nervana",
        pass: 104.1,
    },
    Framework {
        name: "convnet2",
        pass: 177.0,
    },
];

/// Milliseconds of the fully connected layers on one GPU.
pub const FULLY_CONNECTED: f64 = 6.5;

/// Number of GPUs in the single node, which is also the number of sub-batches.
const GPUS: f64 = 4.0;

/// Exposed milliseconds of synchronising the convolutional layers. Only the synchronisation of the
/// smallest layer is exposed.
const CONVOLUTIONS: f64 = 0.05;

/// Milliseconds of the fully connected layers for one sub-batch, split over the GPUs.
const SPLIT_LAYERS: f64 = 3.34;

/// Returns the milliseconds, as printed, of synchronising the fully connected layers that
/// computation does not hide.
pub fn penalty(width: Width) -> f64 {
    match width {
        Width::Bits32 => 6.81,
        Width::Bits8 => 2.55,
    }
}

/// Returns the sum of the printed terms of [`penalty`]. For 32 bits it is 7.01, not 6.81.
pub fn penalty_summed(width: Width) -> f64 {
    // Each pair is (synchronisation, overlapping computation) of one layer in one pass.
    let (terms, last): (&[(f64, f64)], f64) = match width {
        Width::Bits32 => (
            &[
                (0.9, 0.9),
                (1.1, 0.3),
                (1.1, 0.15),
                (0.4, 0.3),
                (1.1, 0.9),
                (1.1, 0.64),
            ],
            0.9,
        ),
        Width::Bits8 => (&[(0.5, 0.3), (0.5, 0.15)], 0.4),
    };
    let exposed = terms.iter().map(|(sync, hidden)| (sync - hidden).max(0.0));
    exposed.sum::<f64>() + 5.0 * last
}

/// Returns the speed-up on four GPUs of one node (Table 1).
pub fn single_node(framework: Framework, penalty: f64) -> f64 {
    let rest = framework.pass - FULLY_CONNECTED;
    GPUS * framework.pass / (rest + CONVOLUTIONS + GPUS * SPLIT_LAYERS + penalty)
}

/// Returns the milliseconds of synchronising a convolutional layer's gradient with this many
/// parameters (Table 3).
pub fn gradient_sync(parameters: f64, rate: f64) -> f64 {
    2.0 * transfer(4.0 * parameters, rate)
}

/// Returns the milliseconds of synchronising activations, with `bytes` in each transfer (Table 3).
pub fn activation_sync(bytes: f64, rate: f64) -> f64 {
    4.0 * transfer(bytes, rate)
}

/// The cluster: number of nodes, of GPUs in all nodes, and of peers to which a node sends.
const NODES: f64 = 32.0;
const CLUSTER_GPUS: f64 = 96.0;
const PEERS: f64 = NODES - 1.0;

/// Number of samples in a whole batch, which is also the largest sub-batch.
const BATCH: f64 = 12288.0;

/// Number of activations per sample in the exchanged layer.
const ACTIVATIONS: f64 = 9216.0;

/// Milliseconds of synchronisation that the computation of one sub-batch hides.
pub const HIDDEN: f64 = 1.3;

/// Returns the milliseconds of a sub-batch's transfers (Table 6, "single"). `size` is the message
/// size relative to 32 bits, and `latency` the milliseconds of a message. 11 = 2 + 3*3 transfers go
/// over PCIe.
pub fn single(sub_batch: f64, size: f64, latency: f64) -> f64 {
    let bytes = sub_batch * ACTIVATIONS * 4.0 / NODES * size;
    11.0 * transfer(bytes, 5.0) + PEERS * (transfer(bytes, 6.0) + latency)
}

/// Returns the milliseconds of a full pass (Table 6, "full") from the milliseconds of a single
/// pass.
pub fn full(single: f64) -> f64 {
    if single <= HIDDEN {
        single
    } else {
        PEERS * (single - HIDDEN)
    }
}

/// Returns the milliseconds of synchronising and computing the fully connected layers (Table 6,
/// "total"), from the full pass.
pub fn total(sub_batch: f64, full: f64) -> f64 {
    BATCH / sub_batch * FULLY_CONNECTED + full
}

/// Returns the speed-up of 96 GPUs (Table 7) from the total.
pub fn cluster(framework: Framework, total: f64) -> f64 {
    CLUSTER_GPUS * framework.pass / (total + framework.pass - FULLY_CONNECTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_in_binary_gigabytes() {
        assert_eq!(transfer(f64::from(1u32 << 30), 5.0), 200.0);
    }

    #[test]
    fn the_printed_penalty_is_not_the_sum_of_its_terms() {
        assert!((penalty_summed(Width::Bits32) - 7.01).abs() < 1e-9);
        assert!((penalty_summed(Width::Bits8) - penalty(Width::Bits8)).abs() < 1e-9);
    }

    #[test]
    fn hidden_synchronisation_costs_nothing_in_a_full_pass() {
        assert_eq!(full(HIDDEN), HIDDEN);
        assert!((full(HIDDEN + 1.0) - PEERS).abs() < 1e-9);
        assert_eq!(total(12288.0, 1.0), 7.5);
    }
}
