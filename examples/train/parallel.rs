//! Data-parallel training: every rank has all weights and a part of every batch.

use super::digits::{self, PIXELS, Split};
use super::layers;
use super::network::{Network, is_right};
use cinch::comm::Call;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::testing::{local_world, random_word};
use cinch::{Algorithm, CodecSpec, Collective, Communicator, Config, DType, ReduceOp, Result};
use std::time::Instant;

/// Number of ranks of every run.
pub const RANKS: usize = 4;
/// Number of images in a step, over all ranks.
pub const BATCH: usize = 64;
/// Default learning rate.
pub const RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;

/// A network, and its division among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// Perceptron, trained data-parallel.
    Mlp,
    /// Convolutional network, trained data-parallel.
    Conv,
    /// Perceptron, trained model-parallel.
    Split,
}

impl Model {
    pub const ALL: [Model; 3] = [Model::Mlp, Model::Conv, Model::Split];

    pub fn name(self) -> &'static str {
        match self {
            Model::Mlp => "mlp",
            Model::Conv => "conv",
            Model::Split => "split",
        }
    }
}

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub model: Model,
    pub codec: CodecSpec,
    pub feedback: bool,
    pub seed: u64,
    pub epochs: usize,
    pub rate: f32,
}

/// Results of a run.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Share of test images with a wrong label.
    pub test_error: f64,
    /// Mean loss of the last epoch.
    pub loss: f64,
    pub steps: usize,
    pub seconds: f64,
    /// Payload bytes that a rank sent, on average over the ranks.
    pub wire_bytes: f64,
}

/// Trains a network. Fails if a call fails, or if ranks end with different weights.
pub fn train(setup: &Setup) -> Result<Outcome> {
    let split = digits::split(setup.seed);
    let ranks = local_world(RANKS, &Config::default(), |comm| match setup.model {
        Model::Mlp => share_batch(comm, setup, &Network::mlp(), &split),
        Model::Conv => share_batch(comm, setup, &Network::conv(), &split),
        Model::Split => layers::train(comm, setup, &split),
    });
    let ranks: Vec<(Outcome, u64)> = ranks.into_iter().collect::<Result<_>>()?;
    let (first, hash) = ranks[0];
    if ranks.iter().any(|(_, other)| *other != hash) {
        return Err(cinch::Error::internal(format!(
            "{setup:?}: ranks ended with different weights"
        )));
    }
    let wire_bytes = ranks
        .iter()
        .map(|(outcome, _)| outcome.wire_bytes)
        .sum::<f64>();
    Ok(Outcome {
        wire_bytes: wire_bytes / RANKS as f64,
        ..first
    })
}

/// The steps of a run, and the images of each step.
pub struct Order<'a> {
    split: &'a Split,
    seed: u64,
    epochs: usize,
}

impl Order<'_> {
    pub fn batches(&self) -> impl Iterator<Item = (usize, Vec<usize>)> {
        (0..self.epochs).flat_map(|epoch| {
            let mut order = self.split.train.clone();
            digits::shuffle(&mut order, random_word(self.seed, 1000 + epoch as u64));
            let batches: Vec<_> = order
                .chunks_exact(BATCH)
                .map(|b| (epoch, b.to_vec()))
                .collect();
            batches
        })
    }
}

pub fn order<'a>(setup: &Setup, split: &'a Split) -> Order<'a> {
    Order {
        split,
        seed: setup.seed,
        epochs: setup.epochs,
    }
}

/// Updates parameters by gradient descent with momentum, equally on all ranks.
pub fn descend(rate: f32, parameters: &mut [f32], speed: &mut [f32], slope: &[f32]) {
    for ((parameter, speed), slope) in parameters.iter_mut().zip(speed).zip(slope) {
        *speed = MOMENTUM * *speed + slope;
        *parameter -= rate * *speed;
    }
}

fn share_batch(
    comm: &Communicator,
    setup: &Setup,
    network: &Network,
    split: &Split,
) -> Result<(Outcome, u64)> {
    let mut parameters = network.start(setup.seed);
    let mut speed = vec![0.0; parameters.len()];
    let (mut slope, mut sum) = (speed.clone(), speed.clone());
    let mut image = [0.0; PIXELS];
    let part = BATCH / RANKS;
    let (mut steps, mut wire_bytes, mut loss) = (0, 0, (0.0, 0));
    let start = Instant::now();
    for (epoch, batch) in order(setup, split).batches() {
        slope.fill(0.0);
        for &sample in &batch[comm.rank() * part..][..part] {
            digits::read(sample, &mut image);
            let label = digits::label(sample);
            let one = network.gradient(&parameters, &image, label, &mut slope);
            if epoch + 1 == setup.epochs {
                loss = (loss.0 + f64::from(one), loss.1 + 1);
            }
        }
        slope.iter_mut().for_each(|slope| *slope /= part as f32);
        for (tensor, place) in network.tensors().into_iter().enumerate() {
            let call = Call {
                op: ReduceOp::Avg,
                codec: Some(setup.codec.into()),
                tensor: Some(tensor as u64),
                feedback: setup.feedback.then_some(tensor as u64),
                // All codecs use one algorithm, so that their wire bytes are comparable.
                algorithm: Some(Algorithm::Direct),
                ..Call::new(Collective::AllReduce, DType::F32, place.len())
            };
            let (input, output) = (&slope[place.clone()], &mut sum[place]);
            let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(output));
            wire_bytes += comm.call(&call, buffers)?.wire_bytes;
        }
        descend(setup.rate, &mut parameters, &mut speed, &sum);
        steps += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    let wrong = split.test.iter().filter(|&&sample| {
        digits::read(sample, &mut image);
        let outputs = network.outputs(&parameters, &image);
        !is_right(&outputs[outputs.len() - 1], digits::label(sample))
    });
    let outcome = Outcome {
        test_error: wrong.count() as f64 / split.test.len() as f64,
        loss: loss.0 / f64::from(loss.1),
        steps,
        seconds,
        wire_bytes: wire_bytes as f64,
    };
    Ok((outcome, hash(&parameters)))
}

pub fn hash(values: &[f32]) -> u64 {
    let fold =
        |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
    values.iter().fold(0xcbf2_9ce4_8422_2325, fold)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cinch::types::CodecKind;

    fn short(model: Model, codec: CodecKind, feedback: bool) -> Outcome {
        let setup = Setup {
            model,
            codec: CodecSpec::of(codec),
            feedback,
            seed: 5,
            epochs: 2,
            rate: RATE,
        };
        train(&setup).unwrap()
    }

    #[test]
    fn two_epochs_learn_something_in_every_model() {
        for model in Model::ALL {
            for (codec, feedback) in [
                (CodecKind::Raw, false),
                (CodecKind::Linear8, false),
                (CodecKind::Dynamic8, model != Model::Split),
            ] {
                let outcome = short(model, codec, feedback);
                assert_eq!(outcome.steps, 2 * (1437 / BATCH));
                assert!(outcome.test_error < 0.3, "{model:?} {codec:?}: {outcome:?}");
                assert!(outcome.loss > 0.0 && outcome.wire_bytes > 0.0);
            }
        }
    }

    #[test]
    fn four_ranks_take_the_step_of_one() {
        // The mean of four quarters' gradients equals the gradient of the batch, up to rounding.
        let four = short(Model::Mlp, CodecKind::Raw, false);
        let network = Network::mlp();
        let mut parameters = network.start(5);
        let mut speed = vec![0.0; parameters.len()];
        let split = digits::split(5);
        let setup = Setup {
            model: Model::Mlp,
            codec: CodecSpec::RAW,
            feedback: false,
            seed: 5,
            epochs: 2,
            rate: RATE,
        };
        let mut image = [0.0; PIXELS];
        for (_, batch) in order(&setup, &split).batches() {
            let mut slope = vec![0.0; parameters.len()];
            for &sample in &batch {
                digits::read(sample, &mut image);
                network.gradient(&parameters, &image, digits::label(sample), &mut slope);
            }
            slope.iter_mut().for_each(|slope| *slope /= BATCH as f32);
            descend(RATE, &mut parameters, &mut speed, &slope);
        }
        let wrong = split.test.iter().filter(|&&sample| {
            digits::read(sample, &mut image);
            let outputs = network.outputs(&parameters, &image);
            !is_right(&outputs[outputs.len() - 1], digits::label(sample))
        });
        let error = wrong.count() as f64 / 360.0;
        assert!((error - four.test_error).abs() < 0.006, "{error} {four:?}");
    }
}
