-- issued -> filtered(reason). ARGV: id, reason, tokens. Returns 'filtered' or 'void'.
if not land(ARGV[1]) then return 'void' end
count('filtered', 1)
count('filtered:' .. ARGV[2], 1)
count('filtered_tokens:' .. ARGV[2], tonumber(ARGV[3]))
return 'filtered'
