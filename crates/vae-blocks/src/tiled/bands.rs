use std::{collections::VecDeque, ops::Range};

use crate::Result;

use super::operations::Operations;

/// An activation between two layers, in bands of rows.
pub(crate) struct Bands<O: Operations> {
    /// From top to bottom; those that are not read again are gone.
    bands: VecDeque<Band<O>>,
    height: usize,
    moments: Option<O::Moments>,
}

struct Band<O: Operations> {
    rows: Range<usize>,
    place: Place<O>,
}

/// Where a band is.
pub(crate) enum Place<O: Operations> {
    Here(O::Tensor),
    Away(O::Away),
}

impl<O: Operations> Bands<O> {
    pub fn new() -> Self {
        Self {
            bands: VecDeque::new(),
            height: 0,
            moments: None,
        }
    }

    /// An activation in one band.
    pub fn whole(ops: &O, x: O::Tensor, moments: Option<O::Moments>) -> Self {
        let mut bands = Self::new();
        bands.height = ops.height(&x);
        bands.moments = moments;
        bands.bands.push_back(Band {
            rows: 0..bands.height,
            place: Place::Here(x),
        });
        bands
    }

    /// Rows that were pushed so far, those that are gone among them.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Of all bands that were pushed with theirs.
    ///
    /// # Panics
    /// If there are none.
    pub fn moments(&self) -> &O::Moments {
        self.moments.as_ref().expect("a norm follows only what is measured")
    }

    pub fn into_moments(self) -> O::Moments {
        self.moments.expect("a norm follows only what is measured")
    }

    /// Appends a band below the others, and lets it be moved away if `is_part`.
    pub fn push(&mut self, ops: &O, x: O::Tensor, moments: Option<O::Moments>, is_part: bool) -> Result<()> {
        let rows = self.height..self.height + ops.height(&x);
        self.height = rows.end;
        if let Some(moments) = moments {
            self.moments = Some(match self.moments.take() {
                Some(others) => ops.merge(others, moments),
                None => moments,
            });
        }
        let place = match is_part {
            true => ops.send_away(x)?,
            false => Place::Here(x),
        };
        self.bands.push_back(Band { rows, place });
        Ok(())
    }

    /// Some rows, from as many bands as they lie in. Those bands, and the next one if it is away, come back for it.
    pub fn rows(&mut self, ops: &O, rows: Range<usize>) -> Result<O::Tensor> {
        let mut pieces = Vec::new();
        let mut ahead = 1;
        let mut bands = VecDeque::with_capacity(self.bands.len());
        while let Some(Band { rows: of_band, place }) = self.bands.pop_front() {
            let place = if of_band.start < rows.end && rows.start < of_band.end {
                let x = match place {
                    Place::Here(x) => x,
                    Place::Away(away) => ops.take_back(away)?,
                };
                let from = rows.start.max(of_band.start)..rows.end.min(of_band.end);
                pieces.push(match from == of_band {
                    true => x.clone(),
                    false => ops.crop(x.clone(), from.start - of_band.start..from.end - of_band.start),
                });
                Place::Here(x)
            } else {
                match place {
                    Place::Away(away) if of_band.start >= rows.end && ahead > 0 => {
                        ahead -= 1;
                        Place::Away(ops.call_back(away)?)
                    }
                    place => place,
                }
            };
            bands.push_back(Band { rows: of_band, place });
        }
        self.bands = bands;
        Ok(match pieces.len() {
            1 => pieces.remove(0),
            _ => ops.stack(pieces),
        })
    }

    /// Drops the bands that end at or above `row`.
    pub fn release_above(&mut self, row: usize) {
        while self.bands.front().is_some_and(|band| band.rows.end <= row) {
            self.bands.pop_front();
        }
    }
}
