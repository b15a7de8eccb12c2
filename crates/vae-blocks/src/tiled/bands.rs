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
    /// None only while it moves.
    place: Option<Place<O>>,
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
            place: Some(Place::Here(x)),
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
        self.bands.push_back(Band {
            rows,
            place: Some(place),
        });
        Ok(())
    }

    /// Some rows, from as many bands as they lie in. Those bands, and the next one if it is away, come back for it.
    pub fn rows(&mut self, ops: &O, rows: Range<usize>) -> Result<O::Tensor> {
        let mut pieces = Vec::new();
        let first = self.bands.partition_point(|band| band.rows.end <= rows.start);
        let past = self.bands.partition_point(|band| band.rows.start < rows.end);
        for band in self.bands.range_mut(first..past) {
            let x = match band.place.take() {
                Some(Place::Here(x)) => x,
                Some(Place::Away(away)) => ops.take_back(away)?,
                None => unreachable!("a band whose move failed ended the decode"),
            };
            let from = rows.start.max(band.rows.start)..rows.end.min(band.rows.end);
            pieces.push(match from == band.rows {
                true => x.clone(),
                false => ops.crop(x.clone(), from.start - band.rows.start..from.end - band.rows.start),
            });
            band.place = Some(Place::Here(x));
        }
        if let Some(next) = self.bands.get_mut(past) {
            next.place = match next.place.take() {
                Some(Place::Away(away)) => Some(Place::Away(ops.call_back(away)?)),
                place => place,
            };
        }
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
