//! Benchmarks element arithmetic on a tile in the first-level cache, for each instruction set: load, one
//! combine, store. The row `memcpy` copies the bytes of an fp32 tile three times.

use cinch::cpu::Isa;
use cinch::reduce::{Reducer, Tile};
use cinch::types::{DType, ReduceOp};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

/// Number of elements in a tile: 8 KiB of fp32.
const TILE: usize = 2048;

fn tile(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reduce_tile");
    group.throughput(Throughput::Elements(TILE as u64));
    let cases = [
        (DType::F32, ReduceOp::Sum),
        (DType::BF16, ReduceOp::Sum),
        (DType::F16, ReduceOp::Sum),
        (DType::F8E4M3, ReduceOp::Sum),
        (DType::I32, ReduceOp::Sum),
        (DType::F32, ReduceOp::Max),
        (DType::I32, ReduceOp::Avg),
    ];
    for (dtype, op) in cases {
        for isa in Isa::available() {
            let reducer = Reducer::new(dtype, op, isa).expect("available");
            let own = vec![0x31u8; TILE * dtype.size()];
            let theirs = vec![0x32u8; TILE * dtype.size()];
            let mut out = vec![0u8; TILE * dtype.size()];
            let mut acc = Tile::new(TILE);
            group.bench_function(format!("{dtype}/{op}/{}", isa.name()), |bencher| {
                bencher.iter(|| {
                    reducer.load(black_box(&own), &mut acc);
                    reducer.combine(black_box(&theirs), &mut acc);
                    reducer.finish(&mut acc, TILE, 4);
                    reducer.store(&acc, black_box(&mut out));
                });
            });
        }
    }
    let source = vec![1u8; TILE * 4];
    let mut copy = vec![0u8; TILE * 4];
    group.bench_function("memcpy", |bencher| {
        bencher.iter(|| {
            for _ in 0..3 {
                black_box(&mut copy).copy_from_slice(black_box(&source));
            }
        });
    });
    group.finish();
}

criterion_group!(benches, tile);
criterion_main!(benches);
