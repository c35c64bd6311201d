"""What stores hold and whether it is sound: info, doctor, salvage, statistics, preview, garbage."""
