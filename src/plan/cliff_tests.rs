//! Tests that no larger message is predicted to be faster than a smaller message by more than 5 %.

use super::gpu_tests::limits;
use super::*;
use crate::mem::PeerBufferLayout;
use crate::schedule::Groups;
use crate::transport::HostLoad;
use crate::types::TransportKind;

/// Largest fraction by which a larger message may be faster than a smaller message.
const FALL: f64 = 0.05;

/// Returns sizes of the larger buffer from 8 bytes to 16 GiB, beyond the last size of the tables. Each size
/// is a quarter larger than the size before it.
fn sizes() -> impl Iterator<Item = usize> {
    let mut next = 8.0f64;
    std::iter::from_fn(move || {
        let size = next as usize;
        next *= 1.25;
        (size <= 16 << 30).then_some(size)
    })
}

/// Returns a sentence for each size of each call that is predicted to be faster than a smaller size.
fn falls(limits: &Limits, codecs: &[&str]) -> Vec<String> {
    falls_of(Planner::new(limits.clone(), 0, Isa::Scalar), codecs)
}

fn falls_of(planner: Planner, codecs: &[&str]) -> Vec<String> {
    let limits = planner.limits();
    let mut found = Vec::new();
    for collective in Collective::ALL {
        for codec in codecs {
            let mut slowest: (f64, usize) = (0.0, 0);
            let mut was_measured = false;
            for size in sizes() {
                let blocks = if collective.has_blocks() {
                    limits.nranks
                } else {
                    1
                };
                let count = (size / 4 / blocks).max(1);
                let request = gpu_tests::request(collective, count, codec);
                let seconds = planner.predict(&request).unwrap();
                // Measured times of a table and predicted times of the model are not compared with
                // each other.
                let [_, built] = planner.codecs(&request).unwrap();
                let is_measured = planner
                    .measured(&request, built.as_deref())
                    .unwrap()
                    .is_ok();
                if is_measured != was_measured {
                    slowest = (0.0, 0);
                }
                was_measured = is_measured;
                if seconds < (1.0 - FALL) * slowest.0 {
                    found.push(format!(
                        "{collective} {codec} x{}: {:.2} us at {} bytes, {:.2} us at {size}",
                        limits.nranks,
                        slowest.0 * 1e6,
                        slowest.1,
                        seconds * 1e6
                    ));
                }
                if seconds > slowest.0 {
                    slowest = (seconds, size);
                }
            }
        }
    }
    found
}

#[test]
fn time_on_gpus_never_falls_when_size_grows() {
    for nranks in [2, 4, 8] {
        let found = falls(&limits(nranks, 132), &["raw", "linear8", "dynamic8"]);
        assert!(found.is_empty(), "{found:#?}");
    }
}

#[test]
fn time_on_gpus_with_many_channels_never_falls_when_size_grows() {
    for nranks in [2, 4, 8] {
        let shape = PeerBufferLayout::new(nranks, 64 << 20, 128).unwrap();
        let mut limits = limits(nranks, 132);
        limits.gpu = Some(GpuLimits {
            ll128: true,
            ..GpuLimits::new(&shape, Resident::both(132), 128)
        });
        let found = falls(&limits, &["raw", "linear8", "dynamic8"]);
        assert!(found.is_empty(), "{found:#?}");
    }
}

/// Covers the sizes of the embedded tables, the sizes beyond their ends, and the sizes left to the model.
#[test]
fn time_by_tables_of_the_library_never_falls_when_size_grows() {
    for nranks in [2, 4, 8] {
        let site = Site {
            gpu: "NVIDIA H200".into(),
            ranks: nranks,
            links: "NVLink".into(),
        };
        let tuning = Tuning::of_library(&vec![site; nranks]).unwrap();
        assert!(matches!(tuning, Tuning::Table(_)), "{tuning}");
        let mut planner = Planner::new(limits(nranks, 132), 0, Isa::Scalar);
        planner.tune(tuning);
        let found = falls_of(planner, &["raw", "linear8", "dynamic8"]);
        assert!(found.is_empty(), "{found:#?}");
    }
}

#[test]
fn time_on_hosts_never_falls_when_size_grows() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        for (nranks, cores) in [(2, 2), (4, 4), (8, 8), (4, 2), (64, 2)] {
            let limits = Limits {
                nranks,
                slot_bytes: 128 << 10,
                slots: 4,
                channels: 2,
                algorithm: None,
                machine: MachineFacts {
                    transport,
                    inside: transport,
                    load: HostLoad {
                        ranks: nranks,
                        cores,
                    },
                    measured: None,
                },
                hosts: Groups::ONE,
                topology: None,
                gpu: None,
            };
            let found = falls(&limits, &["raw", "linear8"]);
            assert!(found.is_empty(), "{transport}, {cores} cores: {found:#?}");
        }
    }
}
