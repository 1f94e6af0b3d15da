"""The screen of `browse`, the only importer of textual: `app` has the keys, `names` is the list on the left, `views`
are the tabs on the right, `dialogs` what is asked."""
