"""Large tests of the whole: bugs put into engines of all kinds, hostile files, kills; nothing may be missed."""
