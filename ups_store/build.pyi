from ups_store.building import *
