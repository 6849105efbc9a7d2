"""The benchmark page: results files in, static HTML out. Claims are computed, never written."""
