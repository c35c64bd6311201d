from ups_store.check.preview import cell_edges as cell_edges
from ups_store.check.preview import colours_of as colours_of
from ups_store.check.preview import save_preview as save_preview
