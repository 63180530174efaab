//! Reads a network as a list of layers.

use cinch::error::{Error, Result};

/// A tensor of parameters, whose gradient is summed over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Name of the layer.
    pub name: String,
    /// Number of elements in the gradient.
    pub elements: usize,
    /// Seconds of the forward pass on one rank.
    pub forward: f64,
    /// Seconds of the backward pass on one rank; the gradient is ready at its end.
    pub backward: f64,
}

impl Layer {
    /// Parses lines of `name,elements[,forward_us,backward_us]`, one for each layer in forward
    /// order. A header whose second field is `elements`, empty lines and lines that begin with `#`
    /// are skipped. Missing times are 0; all communication is then exposed.
    ///
    /// # Errors
    /// Returns an invalid-argument error that names a malformed line, or if there is no layer.
    pub fn parse(text: &str) -> Result<Vec<Layer>> {
        let mut layers = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            if layers.is_empty() && fields.get(1) == Some(&"elements") {
                continue;
            }
            let layer = Layer::of(&fields).map_err(|why| {
                Error::invalid_argument(format!(
                    "line {} of the layers, \"{line}\": {why}; a line is \
                     name,elements[,forward_us,backward_us]",
                    number + 1
                ))
            })?;
            layers.push(layer);
        }
        if layers.is_empty() {
            return Err(Error::invalid_argument("the list of layers has no layer"));
        }
        Ok(layers)
    }

    fn of(fields: &[&str]) -> Result<Layer, String> {
        let (name, elements, times) = match fields {
            [name, elements] => (name, elements, [0.0; 2]),
            [name, elements, forward, backward] => {
                (name, elements, [micros(forward)?, micros(backward)?])
            }
            _ => return Err(format!("it has {} fields", fields.len())),
        };
        let elements = match elements.parse() {
            Ok(elements) if (1..=1usize << 40).contains(&elements) => elements,
            _ => return Err(format!("{elements} is not a number of elements")),
        };
        Ok(Layer {
            name: name.to_string(),
            elements,
            forward: times[0],
            backward: times[1],
        })
    }
}

fn micros(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(micros) if micros.is_finite() && micros >= 0.0 => Ok(micros * 1e-6),
        _ => Err(format!("{text} is not a time in microseconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let layers = Layer::parse(
            "name,elements,forward_us,backward_us\n\n# a comment\nconv1, 23232, 10.5, 21\nfc,10\n",
        )
        .unwrap();
        assert_eq!(layers.len(), 2);
        assert_eq!(
            (layers[0].name.as_str(), layers[0].elements),
            ("conv1", 23232)
        );
        assert!((layers[0].forward - 10.5e-6).abs() < 1e-15);
        assert_eq!((layers[1].forward, layers[1].backward), (0.0, 0.0));
    }

    #[test]
    fn malformed_layers_are_reported_with_their_line() {
        for (text, said) in [
            ("", "no layer"),
            ("a,1\nb", "line 2"),
            ("a,1,2", "3 fields"),
            ("a,0", "0 is not a number of elements"),
            ("a,-1", "-1 is not"),
            ("a,1,x,2", "x is not a time"),
            ("a,1,2,inf", "inf is not a time"),
            ("a,1,-2,3", "-2 is not a time"),
        ] {
            let error = Layer::parse(text).unwrap_err();
            assert!(error.message().contains(said), "{text:?}: {error}");
        }
    }
}
