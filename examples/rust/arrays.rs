//! Encodes an array without a communicator, decodes it, and checks the error of every element.
//!
//! ```sh
//! cargo run -p cinch-examples --example arrays
//! ```

use cinch::arrays::{Isa, Layout, StandAlone};
use cinch::{CodecSpec, Error};

/// Elements that share a scale.
const BLOCK: usize = 256;

fn main() -> cinch::Result<()> {
    let spec: CodecSpec = "linear8:block=256".parse()?;
    let codec = StandAlone::new(spec, Layout::Chunk, Isa::detect())?;
    let gradients: Vec<f32> = (0..100_000).map(|i| (i as f32 * 0.1).sin()).collect();

    let mut encoded = vec![0; codec.bytes(gradients.len())];
    let stats = codec.encode(&gradients, 0, &mut encoded)?;
    let mut decoded = vec![0.0; gradients.len()];
    codec.decode(&encoded, &mut decoded)?;

    // A code is a multiple of the scale, which is the largest magnitude of the block divided by 127.
    for (block, results) in gradients.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
        let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
        let bound = largest / 127.0 * 0.501;
        for (x, y) in block.iter().zip(results) {
            if (x - y).abs() > bound {
                return Err(Error::internal(format!(
                    "{x} became {y}, off by more than {bound}"
                )));
            }
        }
    }
    println!(
        "{} elements in {} bytes as {spec}; the largest was {}",
        gradients.len(),
        encoded.len(),
        stats.abs_max
    );
    Ok(())
}
