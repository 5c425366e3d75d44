-- ready -> expired(bytes_lost), for groups whose spill file is missing or damaged; a group that was used before: -> trained.
-- args: ids, spill_bytes.
for _, id in ipairs(args.ids) do
  if state_of(id) == 'ready' and redis.call('HEXISTS', key('spilled'), id) == 1 then
    end_uses(id, 'bytes_lost', 'its spill file is missing or damaged')
  end
end
