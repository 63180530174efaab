//! Model-parallel training: every rank computes a part of the outputs of every layer, for all images.
//!
//! The forward pass gathers the outputs of each layer. In the backward pass every rank contributes to
//! the gradient of a layer's inputs, which is summed and scattered.

use super::digits::{self, CLASSES, PIXELS, Split};
use super::network::{Layer, cross_entropy, is_right};
use super::parallel::{BATCH, Outcome, RANKS, Setup, descend, hash, order};
use cinch::comm::Call;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::testing::random_word;
use cinch::{CodecSpec, Collective, Communicator, DType, Result};
use std::time::Instant;

/// Widths of the perceptron's layers. Each rank computes a part of the outputs of every layer, except for the
/// last layer, which every rank computes completely.
const WIDTHS: [usize; 4] = [PIXELS, 128, 64, CLASSES];

/// A rank's part of a layer, or the whole layer.
struct Part {
    layer: Layer,
    inputs: usize,
    outputs: usize,
    parameters: Vec<f32>,
    speed: Vec<f32>,
    slope: Vec<f32>,
}

impl Part {
    fn new(at: usize, outputs: usize, seed: u64) -> Part {
        let inputs = WIDTHS[at];
        let layer = Layer::Dense { inputs, outputs };
        let mut parameters = vec![0.0; layer.parameters()];
        layer.start(&mut parameters, seed);
        Part {
            layer,
            inputs,
            outputs,
            speed: vec![0.0; parameters.len()],
            slope: vec![0.0; parameters.len()],
            parameters,
        }
    }

    /// Returns the outputs of a batch, image by image.
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / self.inputs * self.outputs];
        let rows = x
            .chunks_exact(self.inputs)
            .zip(y.chunks_exact_mut(self.outputs));
        rows.for_each(|(x, y)| self.layer.forward(&self.parameters, x, y));
        y
    }

    /// Returns the gradient of the inputs from the gradient of the outputs.
    fn backward(&mut self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let mut dx = vec![0.0; x.len()];
        self.slope.fill(0.0);
        let rows = x
            .chunks_exact(self.inputs)
            .zip(dx.chunks_exact_mut(self.inputs))
            .zip(dy.chunks_exact(self.outputs));
        for ((x, dx), dy) in rows {
            self.layer
                .backward(&self.parameters, x, dy, &mut self.slope, dx);
        }
        dx
    }

    fn descend(&mut self, rate: f32, batch: usize) {
        self.slope
            .iter_mut()
            .for_each(|slope| *slope /= batch as f32);
        descend(rate, &mut self.parameters, &mut self.speed, &self.slope);
    }
}

/// Sends activations and their gradients between ranks.
struct Wire<'a> {
    comm: &'a Communicator,
    codec: CodecSpec,
    bytes: u64,
}

impl Wire<'_> {
    fn call(
        &mut self,
        collective: Collective,
        count: usize,
        input: &[f32],
        output: &mut [f32],
    ) -> Result<()> {
        let call = Call {
            codec: Some(self.codec.into()),
            tensor: Some(count as u64),
            ..Call::new(collective, DType::F32, count)
        };
        let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(output));
        self.bytes += self.comm.call(&call, buffers)?.wire_bytes;
        Ok(())
    }

    /// Gathers the parts of all ranks, side by side for each image.
    fn gather(&mut self, own: &[f32], width: usize) -> Result<Vec<f32>> {
        let mut blocks = vec![0.0; own.len() * RANKS];
        self.call(Collective::AllGather, own.len(), own, &mut blocks)?;
        let (part, images) = (width / RANKS, own.len() * RANKS / width);
        let mut rows = vec![0.0; blocks.len()];
        for (rank, block) in blocks.chunks_exact(own.len()).enumerate() {
            for image in 0..images {
                rows[image * width + rank * part..][..part]
                    .copy_from_slice(&block[image * part..][..part]);
            }
        }
        Ok(rows)
    }

    /// Sums the rows of all ranks and returns this rank's columns of the sum.
    fn scatter(&mut self, rows: &[f32], width: usize) -> Result<Vec<f32>> {
        let (part, images) = (width / RANKS, rows.len() / width);
        let mut blocks = Vec::with_capacity(rows.len());
        for rank in 0..RANKS {
            for image in 0..images {
                blocks.extend_from_slice(&rows[image * width + rank * part..][..part]);
            }
        }
        let mut own = vec![0.0; rows.len() / RANKS];
        self.call(Collective::ReduceScatter, own.len(), &blocks, &mut own)?;
        Ok(own)
    }
}

pub fn train(comm: &Communicator, setup: &Setup, split: &Split) -> Result<(Outcome, u64)> {
    let rank = comm.rank();
    let seed = |layer: usize, rank: usize| random_word(setup.seed, (10 * layer + rank) as u64);
    let mut first = Part::new(0, WIDTHS[1] / RANKS, seed(0, rank));
    let mut second = Part::new(1, WIDTHS[2] / RANKS, seed(1, rank));
    let mut last = Part::new(2, CLASSES, seed(2, 0));
    let mut wire = Wire {
        comm,
        codec: setup.codec,
        bytes: 0,
    };
    let (mut steps, mut loss) = (0, (0.0, 0));
    let start = Instant::now();
    for (epoch, batch) in order(setup, split).batches() {
        let x = images(&batch);
        let (h1, h2, mut dy) = forward(&mut wire, &first, &second, &last, &x)?;
        for (dy, &sample) in dy.chunks_exact_mut(CLASSES).zip(&batch) {
            let one = cross_entropy(dy, digits::label(sample));
            if epoch + 1 == setup.epochs {
                loss = (loss.0 + f64::from(one), loss.1 + 1);
            }
        }
        // The last layer is equal on all ranks, and so is the gradient of its inputs; it needs no
        // communication.
        let mut dh2 = last.backward(&h2, &dy);
        mask(&mut dh2, &h2);
        let dh1 = second.backward(&h1, &columns(&dh2, WIDTHS[2], rank));
        let mut dh1 = wire.scatter(&dh1, WIDTHS[1])?;
        mask(&mut dh1, &columns(&h1, WIDTHS[1], rank));
        first.backward(&x, &dh1);
        for part in [&mut first, &mut second, &mut last] {
            part.descend(setup.rate, BATCH);
        }
        steps += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    let wire_bytes = wire.bytes as f64;
    let x = images(&split.test);
    let (_, _, outputs) = forward(&mut wire, &first, &second, &last, &x)?;
    let rows = outputs.chunks_exact(CLASSES).zip(&split.test);
    let wrong = rows.filter(|(outputs, sample)| !is_right(outputs, digits::label(**sample)));
    let outcome = Outcome {
        test_error: wrong.count() as f64 / split.test.len() as f64,
        loss: loss.0 / f64::from(loss.1),
        steps,
        seconds,
        wire_bytes,
    };
    Ok((outcome, hash(&last.parameters)))
}

/// Returns the outputs of both hidden layers and of the last layer, for a batch.
fn forward(
    wire: &mut Wire<'_>,
    first: &Part,
    second: &Part,
    last: &Part,
    x: &[f32],
) -> Result<(Vec<f32>, Vec<f32>, Vec<f32>)> {
    let relu = |mut y: Vec<f32>| {
        y.iter_mut().for_each(|y| *y = y.max(0.0));
        y
    };
    let h1 = wire.gather(&relu(first.forward(x)), WIDTHS[1])?;
    let h2 = wire.gather(&relu(second.forward(&h1)), WIDTHS[2])?;
    let y = last.forward(&h2);
    Ok((h1, h2, y))
}

fn images(samples: &[usize]) -> Vec<f32> {
    let mut x = vec![0.0; samples.len() * PIXELS];
    for (image, &sample) in x.chunks_exact_mut(PIXELS).zip(samples) {
        digits::read(sample, image);
    }
    x
}

/// Returns the columns that belong to rank `rank` in rows of `width` columns.
fn columns(rows: &[f32], width: usize, rank: usize) -> Vec<f32> {
    let part = width / RANKS;
    let rows = rows.chunks_exact(width);
    rows.flat_map(|row| row[rank * part..][..part].to_vec())
        .collect()
}

/// Applies the derivative of [`relu`] to gradients: sets a gradient to 0 where the output is 0.
fn mask(dy: &mut [f32], y: &[f32]) {
    for (dy, y) in dy.iter_mut().zip(y) {
        // A NaN output keeps its gradient, so that the NaN is not hidden.
        if *y <= 0.0 {
            *dy = 0.0;
        }
    }
}
