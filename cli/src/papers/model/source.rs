//! The speed-up model of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
//! section 5, with all its constants. Times are in milliseconds, as the paper has them.

/// Returns the milliseconds that moving `bytes` takes at `rate` GiB/s.
pub fn transfer(bytes: f64, rate: f64) -> f64 {
    bytes / f64::from(1u32 << 30) / rate * 1e3
}

/// How wide the values are that travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// fp32.
    Bits32,
    /// An 8-bit type.
    Bits8,
}

/// Milliseconds of one pass on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Framework {
    /// Its name.
    pub name: &'static str,
    /// The whole network.
    pub pass: f64,
}

/// The two frameworks that the paper extrapolates from.
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

/// The fully connected layers on one GPU.
pub const FULLY_CONNECTED: f64 = 6.5;

/// GPUs of the single node, and as many sub-batches.
const GPUS: f64 = 4.0;

/// Exposed synchronisation of the convolutional layers: that of the smallest one.
const CONVOLUTIONS: f64 = 0.05;

/// The fully connected layers of one sub-batch, split over the GPUs.
const SPLIT_LAYERS: f64 = 3.34;

/// Returns the cost of synchronising the fully connected layers beyond what computing hides, as printed.
pub fn penalty(width: Width) -> f64 {
    match width {
        Width::Bits32 => 6.81,
        Width::Bits8 => 2.55,
    }
}

/// Returns the sum of the printed terms: for 32 bits they give 7.01, not 6.81.
pub fn penalty_summed(width: Width) -> f64 {
    // (synchronisation, computing that overlaps it), layer by layer and pass by pass.
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

/// Returns the synchronisation of a convolutional layer's gradient of `parameters` (Table 3).
pub fn gradient_sync(parameters: f64, rate: f64) -> f64 {
    2.0 * transfer(4.0 * parameters, rate)
}

/// Returns the synchronisation of activations, `bytes` a transfer (Table 3).
pub fn activation_sync(bytes: f64, rate: f64) -> f64 {
    4.0 * transfer(bytes, rate)
}

/// The cluster: nodes, GPUs of all nodes, and the peers that a node sends to.
const NODES: f64 = 32.0;
const CLUSTER_GPUS: f64 = 96.0;
const PEERS: f64 = NODES - 1.0;

/// Samples of a whole batch, and the largest sub-batch.
const BATCH: f64 = 12288.0;

/// Activations that a sample has in the layer that is exchanged.
const ACTIVATIONS: f64 = 9216.0;

/// Synchronisation that computing one sub-batch hides.
pub const HIDDEN: f64 = 1.3;

/// Returns a sub-batch's transfers (Table 6, "single"), given the size relative to 32 bits and the
/// latency of a message. 11 = 2 + 3*3 shares of PCIe.
pub fn single(sub_batch: f64, size: f64, latency: f64) -> f64 {
    let bytes = sub_batch * ACTIVATIONS * 4.0 / NODES * size;
    11.0 * transfer(bytes, 5.0) + PEERS * (transfer(bytes, 6.0) + latency)
}

/// Returns the time of a full pass from that of a single pass.
pub fn full(single: f64) -> f64 {
    if single <= HIDDEN {
        single
    } else {
        PEERS * (single - HIDDEN)
    }
}

/// Returns the synchronisation and computing of the fully connected layers together, from the full pass.
pub fn total(sub_batch: f64, full: f64) -> f64 {
    BATCH / sub_batch * FULLY_CONNECTED + full
}

/// Returns the speed-up of 96 GPUs (Table 7), from the total.
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
    fn what_computing_hides_costs_nothing_more() {
        assert_eq!(full(HIDDEN), HIDDEN);
        assert!((full(HIDDEN + 1.0) - PEERS).abs() < 1e-9);
        assert_eq!(total(12288.0, 1.0), 7.5);
    }
}
