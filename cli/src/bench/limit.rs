//! Computes the hardware limit: the least time that a call can take on GPUs with NVLink.

use super::metrics::bytes_per_element;
use super::record::Record;
use cinch::{CodecSpec, Collective, DType};

/// Bytes a second that the SMs of an H100 or H200 send over NVLink, to one peer or to all. 18 links
/// of 25 GB/s carry packets of 128 bytes with headers (measured: 369 GB/s to one peer).
const WIRE: f64 = 370e9;
/// Bandwidth of the GPU's own memory in bytes a second: reads plus writes of the SMs, measured with
/// a copy.
const MEMORY: f64 = 3915e9;
/// Seconds from launch to end of a kernel in a graph, without its messages and data.
const LAUNCH: f64 = 2e-6;
/// Seconds of one message with its flag (measured as half a round trip).
const HOP: f64 = 0.74e-6;
/// Number of times that each encoded element crosses GPU memory in scratch buffers. The count
/// covers the element's own encoding, the encodings of the terms of its sum, and the encoded sum.
const CODED_TRIPS: f64 = 3.5;

/// Returns the least seconds of a call. These are the launch, the messages that must follow one
/// another, and the longer of wire time and memory time. N is the number of ranks, S the bytes of
/// the larger buffer, and W the bytes that its elements take on the wire:
///
/// | call | messages | wire | memory |
/// | --- | --- | --- | --- |
/// | all_reduce, one shot | 1 | (N-1) W | 2 S |
/// | all_reduce, two shots | 2 | 2 (N-1)/N W | 2 S |
/// | all_gather, reduce_scatter, gather, scatter, all_to_all | 1 | (N-1)/N W | S (1 + 1/N) |
/// | broadcast, reduce, send_recv | 1 | W | S |
///
/// A codec adds `CODED_TRIPS` trips of the encoded elements through scratch memory. The formula
/// assumes no multicast in the switch.
pub fn seconds(
    collective: Collective,
    ranks: usize,
    size: usize,
    (dtype, codec): (DType, CodecSpec),
) -> f64 {
    let (n, bytes) = (ranks as f64, size as f64);
    if ranks < 2 {
        return LAUNCH + 2.0 * bytes / MEMORY;
    }
    let elements = bytes / dtype.size() as f64;
    let coded = bytes_per_element(codec, dtype);
    let (on_wire, scratch) = match codec.is_lossy() {
        true => (elements * coded, elements * coded * CODED_TRIPS),
        false => (bytes, 0.0),
    };
    let time = |hops: f64, wire: f64, memory: f64| {
        LAUNCH + hops * HOP + (wire / WIRE).max((memory + scratch) / MEMORY)
    };
    match collective {
        Collective::AllReduce => {
            let one_shot = time(1.0, (n - 1.0) * on_wire, 2.0 * bytes);
            one_shot.min(time(2.0, 2.0 * (n - 1.0) / n * on_wire, 2.0 * bytes))
        }
        _ if collective.has_blocks() => time(1.0, (n - 1.0) / n * on_wire, bytes * (1.0 + 1.0 / n)),
        _ => time(1.0, on_wire, bytes),
    }
}

/// Returns the limit of a row in microseconds. Returns `None` where the constants do not hold:
/// other GPUs, several ranks on a GPU, several hosts, host memory, or unknown names.
pub fn of_record(record: &Record) -> Option<f64> {
    let known = ["H100", "H200"]
        .iter()
        .any(|name| record.run.gpu.contains(name));
    if !known || record.ranks_per_gpu != 1 || record.hosts != 1 {
        return None;
    }
    let collective = Collective::from_name(&record.collective)?;
    let dtype = DType::from_name(&record.dtype)?;
    let codec = record.codec.parse().ok()?;
    Some(seconds(collective, record.ranks, record.size, (dtype, codec)) * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn microseconds(ranks: usize, size: usize, dtype: DType, codec: &str) -> f64 {
        let codec = codec.parse().unwrap();
        seconds(Collective::AllReduce, ranks, size, (dtype, codec)) * 1e6
    }

    /// Compares with a table for 8 H200 that was computed elsewhere by the formula of [`seconds`].
    /// Its constants were 0.8 us a message, 4.3 TB/s, and a scale for each 256 elements.
    #[test]
    fn limit_agrees_with_a_table_computed_elsewhere() {
        let table = [
            (1 << 10, 2.8, 2.8, 2.8),
            (64 << 10, 3.9, 3.4, 3.1),
            (1 << 20, 8.6, 6.1, 4.9),
            (16 << 20, 83.0, 43.9, 23.8),
            (64 << 20, 321.0, 165.0, 84.0),
            (256 << 20, 1273.0, 649.0, 326.0),
            (1 << 30, 5082.0, 2583.0, 1294.0),
        ];
        for (size, raw, halves, singles) in table {
            for (ours, theirs) in [
                (microseconds(8, size, DType::F32, "raw"), raw),
                (microseconds(8, size, DType::BF16, "linear8"), halves),
                (microseconds(8, size, DType::F32, "linear8"), singles),
            ] {
                assert!(
                    (ours / theirs - 1.0).abs() < 0.05,
                    "{size}: {ours} {theirs}"
                );
            }
        }
    }

    #[test]
    fn two_ranks_need_no_second_message_and_a_larger_size_no_less_time() {
        // Two ranks send half of the data twice or all of it once, which takes equally long on the
        // wire.
        let one = microseconds(2, 1 << 20, DType::F32, "raw");
        assert!((one - (2.0 + 0.74 + (1 << 20) as f64 / 370e3)).abs() < 1e-9);
        for collective in Collective::ALL {
            let mut before = 0.0;
            for power in 3..31 {
                let way = (DType::F32, CodecSpec::RAW);
                let now = seconds(collective, 4, 1 << power, way);
                assert!(now >= before, "{collective} {power}");
                before = now;
            }
        }
    }
}
