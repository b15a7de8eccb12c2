use std::{collections::BTreeSet, fmt};

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{DType, FloatDType, Tensor, TensorData},
};
use vae_io::{Checkpoint, Error, Result, ShapeMismatch};

/// What applying a checkpoint to a module did. Keys are the module's parameter paths in diffusers' spelling.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Parameters that were loaded.
    pub applied: Vec<String>,
    /// Parameters that the checkpoint lacks.
    pub missing: Vec<String>,
    /// Decoder tensors of the checkpoint that the module has no place for.
    pub unexpected: Vec<String>,
    /// Tensors whose shape is not the parameter's.
    pub mismatched: Vec<ShapeMismatch>,
    /// Tensors of the file that are not the decoder's: encoder, text encoders, EMA, ...
    pub ignored: usize,
}

impl LoadReport {
    /// Refuses anything but a complete and exact match.
    ///
    /// # Errors
    /// [`Error::WeightsMismatch`] with all differences.
    pub fn check(&self) -> Result<()> {
        if self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty() {
            return Ok(());
        }
        Err(Error::WeightsMismatch {
            missing: self.missing.clone(),
            unexpected: self.unexpected.clone(),
            mismatched: self.mismatched.clone(),
        })
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tensors applied, {} of the file are not the decoder's",
            self.applied.len(),
            self.ignored
        )?;
        let differences = [
            (self.missing.len(), "missing"),
            (self.unexpected.len(), "unexpected"),
            (self.mismatched.len(), "of another shape"),
        ];
        differences
            .iter()
            .filter(|(count, _)| *count > 0)
            .try_for_each(|(count, what)| write!(f, ", {count} {what}"))
    }
}

/// Loads every float parameter of `module` from the checkpoint's tensor of the same path, converted to `dtype`.
///
/// Parameters that the checkpoint lacks or has in another shape keep their values; see [`LoadReport::check`].
pub fn apply_checkpoint<M: Module>(module: M, checkpoint: &Checkpoint, dtype: FloatDType) -> (M, LoadReport) {
    let mut loader = Loader {
        checkpoint,
        dtype: dtype.into(),
        path: Vec::new(),
        containers: Vec::new(),
        report: LoadReport {
            ignored: checkpoint.ignored(),
            ..LoadReport::default()
        },
    };
    let module = module.map(&mut loader);
    let mut report = loader.report;
    let mismatched = report.mismatched.iter().map(|mismatch| &mismatch.key);
    let known: BTreeSet<&str> = report.applied.iter().chain(mismatched).map(String::as_str).collect();
    report.unexpected = checkpoint
        .keys()
        .filter(|key| !known.contains(key))
        .map(str::to_string)
        .collect();
    (module, report)
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    dtype: DType,
    path: Vec<String>,
    /// The type of the module at each step of `path`, as Burn names it: "Struct:Linear".
    containers: Vec<String>,
    report: LoadReport,
}

impl ModuleMapper for Loader<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(name.to_string());
        self.containers.push(container_type.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let key = self.path.join(".");
        let Some(tensor) = self.checkpoint.get(&key) else {
            self.report.missing.push(key);
            return param;
        };
        // PyTorch keeps a linear layer's weight as [out, in], Burn as [in, out].
        let is_linear_weight = D == 2 && self.containers.iter().any(|container| container == "Struct:Linear");
        let mut shape = param.lazy_shape().to_vec();
        if is_linear_weight {
            shape.reverse();
        }
        if shape != tensor.shape {
            self.report.mismatched.push(ShapeMismatch {
                key,
                expected: shape,
                found: tensor.shape.to_vec(),
            });
            return param;
        }
        self.report.applied.push(key);

        let mut values = tensor.to_f32();
        if is_linear_weight {
            values = transposed(&values, shape[1]);
            shape.reverse();
        }
        // Through f32 to the target: exact for every half type, one rounding from f32 (f64 rounds twice).
        let data = TensorData::new(values, shape).convert_dtype(self.dtype);
        let id = param.id;
        let value = Tensor::from_data(data, (&param.lazy_device(), self.dtype));
        param.transform_for_load(value, id)
    }
}

/// The transpose of a row-major matrix of `columns` columns.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| values.iter().skip(column).step_by(columns).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_that_is_not_square_is_transposed() {
        assert_eq!(
            transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3),
            [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]
        );
    }
}
