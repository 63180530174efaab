//! The limit: the least time that a call can take on GPUs with NVLink.

use super::metrics::bytes_per_element;
use super::record::Record;
use cinch::{CodecSpec, Collective, DType};

/// Bytes a second that the multiprocessors of an H100 or H200 send over NVLink, to one peer or to all:
/// 18 links of 25 GB/s carry packets of 128 bytes with their heads (measured: 369 to one peer).
const WIRE: f64 = 370e9;
/// Bytes a second that they read and write of their own memory (measured: a copy).
const MEMORY: f64 = 3915e9;
/// Seconds from the launch of a kernel in a graph to its end.
const LAUNCH: f64 = 2e-6;
/// Seconds of one message that announces itself (measured: half a round trip).
const HOP: f64 = 0.74e-6;
/// Times that a coded element is written to, or read from, memory on its way through scratch space: its
/// own code, those of its sum's terms, and the sum's.
const CODED_TRIPS: f64 = 3.5;

/// Returns the seconds of the launch, the messages that follow one another, and the longer one of what the wire
/// carries and what memory moves, as both work at once. With N ranks, S bytes of the larger buffer, and
/// W the bytes of that on the wire:
///
/// | call | messages | wire | memory |
/// | --- | --- | --- | --- |
/// | all_reduce, one shot | 1 | (N-1) W | 2 S |
/// | all_reduce, two shots | 2 | 2 (N-1)/N W | 2 S |
/// | all_gather, reduce_scatter, gather, scatter, all_to_all | 1 | (N-1)/N W | S (1 + 1/N) |
/// | broadcast, reduce, send_recv | 1 | W | S |
///
/// A codec adds its trips through scratch memory. No multicast in the switch.
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

/// Returns the limit of a row in microseconds; none where the figures do not hold: other GPUs, several
/// ranks on one, several hosts, host memory, names that this version does not know.
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

    /// The published floor of 8 H200, which has 0.8 us a message, 4.3 TB/s, and scales for each 256
    /// elements: a table computed elsewhere, by the same formula.
    #[test]
    fn the_limit_is_the_floor_of_the_formula() {
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
        // Half of the data twice, or all of it once.
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
