//! Tests pre-multiplied sums with factors in GPU memory. Outputs must have the bits that an equal
//! factor passed by value gives. The factor must be read in stream order.

use crate::arena::{Arena, context};
use crate::case::factor;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::world::World;
use cinch::comm::Call;
use cinch::cpu::Isa;
use cinch::gpu::DeviceMemory;
use cinch::types::{KernelProtocol, Scalar};
use cinch::{Collective, Communicator, DType, ReduceOp};

/// Elements of a fused call, and of a call with many chunks.
const COUNTS: [usize; 2] = [1000, 150_000];
const OUTPUT: usize = 8 * COUNTS[1];

pub fn checks() -> Vec<Check> {
    vec![Check::new("factors/on-the-gpu", 1, on_the_gpu).within(120)]
}

fn on_the_gpu(setup: &Setup) -> Verdict {
    let mut calls = 0;
    for protocol in [None, Some(KernelProtocol::SIMPLE), Some(KernelProtocol::LL)] {
        let mut world = World::new(setup, 2, 1);
        world.config.force_kernel(protocol);
        let arenas = world.arenas(3 * OUTPUT)?;
        let gpu = context(world.gpus[0].unwrap_or(0))?;
        let places = [(); 2].map(|()| DeviceMemory::new(&gpu, 256));
        let [first, second] = places;
        let places = [first?, second?];
        let done = world.run(|comm| {
            let (arena, place) = (&arenas[comm.rank()], &places[comm.rank()]);
            // The input is finite in every type, because a codec block with a NaN is NaN under any
            // factor.
            let input: Vec<u8> = (0..OUTPUT)
                .map(|at| (at % 61 + comm.rank()) as u8)
                .collect();
            arena.write(0, &input)?;
            let mut done = 0;
            for dtype in DType::ALL {
                for count in COUNTS {
                    for codec in ["raw", "linear8"] {
                        let lossy = codec != "raw";
                        if lossy && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
                            continue;
                        }
                        let call = Call {
                            codec: Some(codec.parse()?),
                            ..Call::new(Collective::AllReduce, dtype, count)
                        };
                        one(comm, arena, place, call)?;
                        done += 3;
                    }
                }
            }
            Ok(done)
        })?;
        calls += done[0];
    }
    Ok(format!("{calls} calls"))
}

/// Makes the call three times: with a factor by value, with an equal factor on the GPU, and after
/// the stream has zeroed the factor on the GPU.
fn one(comm: &Communicator, arena: &Arena, place: &DeviceMemory, call: Call) -> Result<(), Stop> {
    let stream = arena.stream()?;
    let bytes = call.count * call.dtype.size();
    let number = factor(call.dtype, comm.rank());
    place.write(
        0,
        &element(call.dtype, number),
        stream,
        crate::arena::PATIENCE,
    )?;
    let run = |scalar, at: usize| {
        let call = Call {
            op: ReduceOp::PreMulSum(scalar),
            ..call
        };
        let buffers = arena.buffers((0, bytes), (at, bytes), stream)?;
        comm.call_on(&call, buffers)
    };
    let mut wanted = vec![0; bytes];
    run(number, OUTPUT)?;
    arena.wait(comm)?;
    arena.read(OUTPUT, &mut wanted)?;

    run(Scalar::Device(place.address()), OUTPUT)?;
    place.fill(0, stream)?;
    run(Scalar::Device(place.address()), 2 * OUTPUT)?;
    arena.wait(comm)?;
    let (mut found, mut behind) = (vec![0; bytes], vec![1; bytes]);
    arena.read(OUTPUT, &mut found)?;
    arena.read(2 * OUTPUT, &mut behind)?;
    ensure(found == wanted, || {
        format!("{call:?}: a factor on the GPU gives other bits than {number:?}")
    })?;
    ensure(behind != wanted, || {
        format!("{call:?}: the factor was not read where the call stands in the stream")
    })
}

/// Returns the bytes of `number` as an element of `dtype`.
fn element(dtype: DType, number: Scalar) -> Vec<u8> {
    let mut bytes = vec![0; dtype.size()];
    match (number, dtype) {
        (Scalar::Int(number), _) => {
            let size = bytes.len();
            bytes.copy_from_slice(&number.to_le_bytes()[..size]);
        }
        (Scalar::Float(number), DType::F64) => bytes = number.to_le_bytes().to_vec(),
        (Scalar::Float(number), _) => {
            cinch::reduce::narrow(dtype, Isa::Scalar, &[number as f32], &mut bytes);
        }
        (Scalar::Device(_), _) => unreachable!("a number of the host"),
    }
    bytes
}
