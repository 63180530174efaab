//! Small networks on one rank: forward and backward passes.

use super::digits::{CLASSES, PIXELS};
use cinch::testing::{gaussian, random_word};
use std::ops::Range;

/// A layer. Its parameters are weights, then biases.
#[derive(Clone, Copy)]
pub enum Layer {
    /// Dense layer; weights are `[inputs][outputs]`.
    Dense { inputs: usize, outputs: usize },
    /// 3 x 3 convolution with stride 1 and a zero padding of 1. Activations are stored one channel after
    /// another; weights are `[outputs][inputs][3][3]`.
    Conv {
        inputs: usize,
        outputs: usize,
        side: usize,
    },
    /// Rectifier: max(0, x).
    Relu { elements: usize },
    /// 2 x 2 max pooling with stride 2, in each channel.
    Pool { channels: usize, side: usize },
}

impl Layer {
    pub fn parameters(self) -> usize {
        match self {
            Layer::Dense { inputs, outputs } => (inputs + 1) * outputs,
            Layer::Conv {
                inputs, outputs, ..
            } => (9 * inputs + 1) * outputs,
            _ => 0,
        }
    }

    fn outputs(self) -> usize {
        match self {
            Layer::Dense { outputs, .. } => outputs,
            Layer::Conv { outputs, side, .. } => outputs * side * side,
            Layer::Relu { elements } => elements,
            Layer::Pool { channels, side } => channels * side * side / 4,
        }
    }

    /// Sets weights to random values and biases to 0.
    pub fn start(self, parameters: &mut [f32], seed: u64) {
        let (weights, fan_in) = match self {
            Layer::Dense { inputs, outputs } => (inputs * outputs, inputs),
            Layer::Conv {
                inputs, outputs, ..
            } => (9 * inputs * outputs, 9 * inputs),
            _ => return,
        };
        let deviation = (2.0 / fan_in as f64).sqrt();
        for (at, weight) in parameters[..weights].iter_mut().enumerate() {
            *weight = (gaussian(random_word(seed, at as u64)) * deviation) as f32;
        }
    }

    pub fn forward(self, parameters: &[f32], x: &[f32], y: &mut [f32]) {
        match self {
            Layer::Dense { inputs, outputs } => {
                y.copy_from_slice(&parameters[inputs * outputs..]);
                for (x, row) in x.iter().zip(parameters.chunks_exact(outputs)) {
                    if *x != 0.0 {
                        y.iter_mut().zip(row).for_each(|(y, w)| *y += x * w);
                    }
                }
            }
            Layer::Conv {
                inputs,
                outputs,
                side,
            } => {
                let plane = side * side;
                for (output, y) in y.chunks_exact_mut(plane).enumerate() {
                    y.fill(parameters[9 * inputs * outputs + output]);
                    for (input, x) in x.chunks_exact(plane).enumerate() {
                        let kernel = &parameters[9 * (output * inputs + input)..][..9];
                        taps(side, |tap, to, from| y[to] += kernel[tap] * x[from]);
                    }
                }
            }
            Layer::Relu { .. } => {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = x.max(0.0);
                }
            }
            Layer::Pool { side, .. } => {
                for (to, y) in y.iter_mut().enumerate() {
                    *y = x[largest(x, to, side)];
                }
            }
        }
    }

    /// Adds the gradient of the parameters to `slope`, and writes the gradient of the inputs to `dx`. Both
    /// are computed from the gradient `dy` of the outputs.
    pub fn backward(
        self,
        parameters: &[f32],
        x: &[f32],
        dy: &[f32],
        slope: &mut [f32],
        dx: &mut [f32],
    ) {
        dx.fill(0.0);
        match self {
            Layer::Dense { inputs, outputs } => {
                let rows = parameters.chunks_exact(outputs);
                let slopes = slope.chunks_exact_mut(outputs);
                for (((x, dx), row), slope) in x.iter().zip(dx).zip(rows).zip(slopes) {
                    *dx = row.iter().zip(dy).map(|(w, dy)| w * dy).sum();
                    slope.iter_mut().zip(dy).for_each(|(s, dy)| *s += x * dy);
                }
                add(&mut slope[inputs * outputs..], dy);
            }
            Layer::Conv {
                inputs,
                outputs,
                side,
            } => {
                let plane = side * side;
                for (output, dy) in dy.chunks_exact(plane).enumerate() {
                    slope[9 * inputs * outputs + output] += dy.iter().sum::<f32>();
                    for input in 0..inputs {
                        let at = 9 * (output * inputs + input);
                        let (kernel, slope) = (&parameters[at..][..9], &mut slope[at..][..9]);
                        let x = &x[input * plane..][..plane];
                        let dx = &mut dx[input * plane..][..plane];
                        taps(side, |tap, to, from| {
                            slope[tap] += x[from] * dy[to];
                            dx[from] += kernel[tap] * dy[to];
                        });
                    }
                }
            }
            Layer::Relu { .. } => {
                for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
                    *dx = if *x > 0.0 { *dy } else { 0.0 };
                }
            }
            Layer::Pool { side, .. } => {
                for (to, dy) in dy.iter().enumerate() {
                    dx[largest(x, to, side)] += dy;
                }
            }
        }
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// Calls `visit` for each tap of a 3 x 3 kernel and each output place whose input place is inside the image.
/// The arguments are the number of the tap, the output place and the input place.
fn taps(side: usize, mut visit: impl FnMut(usize, usize, usize)) {
    for tap in 0..9 {
        let (down, right) = (tap / 3, tap % 3);
        for y in 1usize.saturating_sub(down)..side.min(side + 1 - down) {
            for x in 1usize.saturating_sub(right)..side.min(side + 1 - right) {
                visit(tap, y * side + x, (y + down - 1) * side + x + right - 1);
            }
        }
    }
}

/// Returns the index of the largest input in the square that pooled place `to` covers; `side` is the side
/// length of the input.
fn largest(x: &[f32], to: usize, side: usize) -> usize {
    let half = side / 2;
    let (channel, place) = (to / (half * half), to % (half * half));
    let first = channel * side * side + place / half * 2 * side + place % half * 2;
    [1, side, side + 1].into_iter().fold(first, |best, offset| {
        if x[first + offset] > x[best] {
            first + offset
        } else {
            best
        }
    })
}

/// Replaces the inputs of a softmax by the gradient of its cross-entropy, and returns the loss.
pub fn cross_entropy(outputs: &mut [f32], label: usize) -> f32 {
    let most = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    outputs.iter_mut().for_each(|o| *o = (*o - most).exp());
    let sum: f32 = outputs.iter().sum();
    outputs.iter_mut().for_each(|o| *o /= sum);
    let loss = -outputs[label].max(f32::MIN_POSITIVE).ln();
    outputs[label] -= 1.0;
    loss
}

/// Returns whether the largest output belongs to `label`.
pub fn is_right(outputs: &[f32], label: usize) -> bool {
    outputs
        .iter()
        .enumerate()
        .all(|(at, &o)| at == label || o < outputs[label])
}

/// Layers in order, and the ranges of their parameters in one array.
pub struct Network {
    layers: Vec<(Layer, Range<usize>)>,
}

impl Network {
    pub fn new(layers: &[Layer]) -> Network {
        let mut end = 0;
        let place = |&layer: &Layer| {
            let start = end;
            end += layer.parameters();
            (layer, start..end)
        };
        Network {
            layers: layers.iter().map(place).collect(),
        }
    }

    /// Creates the perceptron 64-128-64-10.
    pub fn mlp() -> Network {
        let dense = |inputs, outputs| Layer::Dense { inputs, outputs };
        let relu = |elements| Layer::Relu { elements };
        Network::new(&[
            dense(PIXELS, 128),
            relu(128),
            dense(128, 64),
            relu(64),
            dense(64, CLASSES),
        ])
    }

    /// Creates two convolutions of 8 and 16 channels, each followed by pooling, and a dense layer.
    pub fn conv() -> Network {
        let conv = |inputs, outputs, side| Layer::Conv {
            inputs,
            outputs,
            side,
        };
        Network::new(&[
            conv(1, 8, 8),
            Layer::Relu { elements: 512 },
            Layer::Pool {
                channels: 8,
                side: 8,
            },
            conv(8, 16, 4),
            Layer::Relu { elements: 256 },
            Layer::Pool {
                channels: 16,
                side: 4,
            },
            Layer::Dense {
                inputs: 64,
                outputs: CLASSES,
            },
        ])
    }

    /// Returns the ranges of the tensors to sum: one for each layer with parameters.
    pub fn tensors(&self) -> Vec<Range<usize>> {
        let places = self.layers.iter().map(|(_, place)| place.clone());
        places.filter(|place| !place.is_empty()).collect()
    }

    /// Returns initial parameters.
    pub fn start(&self, seed: u64) -> Vec<f32> {
        let last = self.layers.last().map_or(0, |(_, place)| place.end);
        let mut parameters = vec![0.0; last];
        for (at, (layer, place)) in self.layers.iter().enumerate() {
            let seed = random_word(seed, at as u64);
            layer.start(&mut parameters[place.clone()], seed);
        }
        parameters
    }

    /// Returns the image and the outputs of every layer for it.
    pub fn outputs(&self, parameters: &[f32], image: &[f32]) -> Vec<Vec<f32>> {
        let mut values = vec![image.to_vec()];
        for (layer, place) in &self.layers {
            let mut y = vec![0.0; layer.outputs()];
            layer.forward(
                &parameters[place.clone()],
                &values[values.len() - 1],
                &mut y,
            );
            values.push(y);
        }
        values
    }

    /// Adds the gradient of an image's loss to `slope`, and returns the loss.
    pub fn gradient(
        &self,
        parameters: &[f32],
        image: &[f32],
        label: usize,
        slope: &mut [f32],
    ) -> f32 {
        let mut values = self.outputs(parameters, image);
        let mut dy = values.pop().unwrap_or_default();
        let loss = cross_entropy(&mut dy, label);
        for (layer, place) in self.layers.iter().rev() {
            let Some(x) = values.pop() else { break };
            let mut dx = vec![0.0; x.len()];
            let (parameters, slope) = (&parameters[place.clone()], &mut slope[place.clone()]);
            layer.backward(parameters, &x, &dy, slope, &mut dx);
            dy = dx;
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::super::digits;
    use super::*;

    #[test]
    fn gradients_are_those_of_differences() {
        for network in [Network::mlp(), Network::conv()] {
            let mut parameters = network.start(3);
            let mut image = vec![0.0; PIXELS];
            digits::read(17, &mut image);
            let label = digits::label(17);
            let mut slope = vec![0.0; parameters.len()];
            let mut unused = slope.clone();
            network.gradient(&parameters, &image, label, &mut slope);
            let mut seen = 0;
            for at in (0..parameters.len()).step_by(37) {
                let kept = parameters[at];
                let step = 1e-3;
                let mut loss = |value| {
                    parameters[at] = value;
                    f64::from(network.gradient(&parameters, &image, label, &mut unused))
                };
                let difference = (loss(kept + step) - loss(kept - step)) / (2.0 * f64::from(step));
                parameters[at] = kept;
                let distance = (difference - f64::from(slope[at])).abs();
                assert!(
                    distance < 2e-2 * difference.abs().max(0.05),
                    "{at}: {difference} {}",
                    slope[at]
                );
                seen += usize::from(slope[at] != 0.0);
            }
            assert!(seen > 20, "{seen}");
        }
    }

    #[test]
    fn tensors_tile_the_parameters() {
        let network = Network::conv();
        let tensors = network.tensors();
        let lengths: Vec<usize> = tensors.iter().map(|tensor| tensor.len()).collect();
        assert_eq!(lengths, [80, 1168, 650]);
        assert_eq!(network.start(1).len(), 80 + 1168 + 650);
    }
}
